"""The CUDA C++ kernels of products.cu: compiled once with nvcc, kept in the user's cache directory, called through ctypes.

They need a GPU of compute capability 9.0 or newer with enough shared memory per block, and nvcc the first time. Where either is missing the
Triton kernels run instead; `why_not` says why, and a warning says it once.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch

from manifests.errors import DeviceError

SOURCE = Path(__file__).with_name("products.cu")
# -fmad=false: a product and a sum are fused only where the source says fmaf.
NVCC_FLAGS = ("-O3", "-std=c++17", "-fmad=false", "-shared", "-Xcompiler", "-fPIC")
LEAST_CAPABILITY = (9, 0)
LEAST_SHARED_BYTES = 227 * 1024
_NVCC_PLACES = ("/usr/local/cuda/bin/nvcc",)

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "ktier_q8_0": (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT),
    "ktier_experts": (_POINTER, _INT, *[_POINTER] * 4, _INT, *[_POINTER] * 2, _INT, _INT, _POINTER, _FLOAT, _FLOAT, _INT),
    "ktier_bf16": (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT),
}


@cache
def find_library(device: torch.device) -> ctypes.CDLL | None:
    """Return the compiled kernels for a CUDA device, or None, with a warning that says why, if they cannot be had."""
    reason = why_not(device)
    if reason is None:
        try:
            return load(compiled(_architecture(device)))
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            reason = f"nvcc failed to compile {SOURCE.name}: {output.strip().splitlines()[-1]}"
    warnings.warn(f"the CUDA C++ kernels do not run on {device}, slower Triton kernels do: {reason}", RuntimeWarning, stacklevel=2)
    return None


def why_not(device: torch.device) -> str | None:
    """Return why the compiled kernels cannot run on a CUDA device, or None if they can."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    if capability < LEAST_CAPABILITY:
        return f"its compute capability is {capability[0]}.{capability[1]}, they need {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared < LEAST_SHARED_BYTES:
        return f"it has {shared} bytes of shared memory for a block, they need {LEAST_SHARED_BYTES}"
    if not cached_path(_architecture(device)).exists() and find_nvcc() is None:
        return "nvcc is not on the PATH; install CUDA's compiler, or put its bin directory on the PATH"
    return None


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or next((place for place in _NVCC_PLACES if os.access(place, os.X_OK)), None)


def cached_path(architecture: str) -> Path:
    """Return where the library of the present source lies once it is compiled."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = (SOURCE.read_text(), architecture, torch.__version__, *NVCC_FLAGS)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return root / "ktier" / f"products-{architecture}-{digest}.so"


def compiled(architecture: str) -> Path:
    """Compile the kernels for an architecture such as sm_90, unless it was done before, and return the library's path.

    Raises CalledProcessError if nvcc fails, OSError if it is missing or the cache directory cannot be written.
    """
    path = cached_path(architecture)
    if not path.exists():
        warnings.warn(f"compiling the CUDA C++ kernels for {architecture}, once; half a minute", RuntimeWarning, stacklevel=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = Path(directory) / path.name
            target = f"-gencode=arch=compute_{architecture[3:]},code={architecture}"
            command = [find_nvcc() or "nvcc", *NVCC_FLAGS, target, "-o", str(made), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(path)
    return path


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    library.ktier_error.restype = ctypes.c_char_p
    return library


def check(library: ctypes.CDLL, status: int, what: str) -> None:
    """Raise DeviceError if a launch failed."""
    if status:
        raise DeviceError(f"the GPU refused {what}: {library.ktier_error(status).decode()}; start this process again")


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
