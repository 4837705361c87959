"""CUDA calls that a layer makes dozens of times, past torch's layers: through those one costs 20 to 50 us of the interpreter's time, so 1 to 4."""

import ctypes
from functools import cache

import torch

from manifests.errors import DeviceError


def raw_stream(device: torch.device) -> int:
    """Return the current stream of a device as the number that CUDA knows it by."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0)


def upload(target: int, source: int, n_bytes: int, stream: int) -> None:
    """Copy registered host memory to a device, both given by address, behind what the stream holds. Raises DeviceError.

    The thread must have used the device before.
    """
    if status := _driver().cuMemcpyHtoDAsync_v2(target, source, n_bytes, stream):
        raise refused_upload(status)


def refused_upload(status: int) -> DeviceError:
    """Return the error that a status of the driver is."""
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return DeviceError(f"the GPU refused an upload: {(text.value or b'unknown error').decode()}; start this process again")


def upload_functions() -> tuple[int, int, int]:
    """Return how other threads upload as `upload` does, to the device that this thread uses: the addresses of the function that copies, of the one by
    which a thread enters a context, and that context. Raises DeviceError if this thread has not used a device.
    """
    context, driver = ctypes.c_void_p(), _driver()
    status = driver.cuCtxGetCurrent(ctypes.byref(context))
    if status or not context.value:
        raise DeviceError("uploads need a GPU that this thread has used before")
    copy, enter = (ctypes.cast(function, ctypes.c_void_p).value for function in (driver.cuMemcpyHtoDAsync_v2, driver.cuCtxSetCurrent))
    assert copy and enter
    return copy, enter, context.value


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    library.cuGetErrorString.argtypes = (ctypes.c_int, ctypes.c_void_p)
    return library
