"""The CUDA C++ kernels of products.cu: compiled once with nvcc, kept in the user's cache directory, called through ctypes.

They need a GPU of compute capability 8.0 or newer, whose shared memory per block decides the variant, and nvcc the first time. Where something is
missing, or they were wrong on this very GPU, the Triton kernels run instead: `why_not` says why, a warning says it once, and `fall_back` counts.
All variants give the same bits.
"""

import ctypes
import os
import shutil
import subprocess
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from layout.compiled import cached_library, compile_once, why_it_failed
from manifests.errors import DeviceError

SOURCE = Path(__file__).with_name("products.cu")
# -fmad=false: a product and a sum are fused only where the source says fmaf.
NVCC_FLAGS = ("-O3", "-std=c++17", "-fmad=false", "-shared", "-Xcompiler", "-fPIC")
# bfloat16 on tensor cores, and copies from global to shared memory.
LEAST_CAPABILITY = (8, 0)
# Bulk copies, barriers that count their bytes, clusters, overlapping launches.
BULK_CAPABILITY = (9, 0)
_NVCC_PLACES = ("/usr/local/cuda/bin/nvcc",)

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "ktier_q8_0": (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT),
    "ktier_experts": (_POINTER, _INT, *[_POINTER] * 4, _INT, *[_POINTER] * 2, _INT, _INT, _POINTER, _FLOAT, _FLOAT, _INT),
    "ktier_bf16": (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT),
}


class Variant(NamedTuple):
    """What the kernels are compiled for: the shared memory that a block may have, and whether there are bulk copies."""

    name: str
    shared_bytes: int
    has_bulk_copies: bool

    @property
    def flags(self) -> tuple[str, ...]:
        return f"-DKTIER_SHARED_BYTES={self.shared_bytes}", f"-DKTIER_BULK={self.has_bulk_copies:d}"

    def runs_on(self, capability: tuple[int, int], shared_bytes: int) -> bool:
        return self.shared_bytes <= shared_bytes and capability >= (BULK_CAPABILITY if self.has_bulk_copies else LEAST_CAPABILITY)


# Compute capability 9.0, 10.x and 11.0; 8.0 and 8.7; 12.x; 8.6 and 8.9. A device takes the first that runs on it.
LARGE = Variant("large", 227 * 1024, has_bulk_copies=True)
VARIANTS = (
    LARGE,
    Variant("medium", 163 * 1024, has_bulk_copies=False),
    Variant("small", 99 * 1024, has_bulk_copies=True),
    Variant("small-plain", 99 * 1024, has_bulk_copies=False),
)
LEAST_SHARED_BYTES = min(variant.shared_bytes for variant in VARIANTS)

# Why the kernels are not to be used on a device although they would run, and how often Triton's took a product that these do not.
_rejected: dict[torch.device, str] = {}
_n_fallen_back: Counter[str] = Counter()


@cache
def find_library(device: torch.device, variant: Variant | None = None) -> ctypes.CDLL | None:
    """Return the compiled kernels for a CUDA device, or None, with a warning that says why, if they cannot be had.

    variant  which to take instead of the device's own, for tests and measurements
    """
    reason = why_not(device)
    if reason is None:
        try:
            return load(compiled(_architecture(device), variant or variant_of(device)))
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"nvcc failed to compile {SOURCE.name}: {why_it_failed(error)}"
    say_once(f"the CUDA C++ kernels do not run on {device}, slower Triton kernels do: {reason}")
    return None


def why_not(device: torch.device) -> str | None:
    """Return why the compiled kernels cannot run on a CUDA device, or None if they can."""
    if device in _rejected:
        return _rejected[device]
    capability, shared = _facts(device)
    if capability < LEAST_CAPABILITY:
        return f"its compute capability is {capability[0]}.{capability[1]}, they need {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    if shared < LEAST_SHARED_BYTES:
        return f"it has {shared} bytes of shared memory for a block, they need {LEAST_SHARED_BYTES}"
    if not path_on(device).exists() and find_nvcc() is None:
        return "nvcc is not on the PATH; install CUDA's compiler, or put its bin directory on the PATH"
    return None


def reject(device: torch.device, reason: str) -> None:
    """Have Triton's kernels used on a device from now on. What CUDA graphs hold stays."""
    _rejected[device] = reason
    find_library.cache_clear()


def choose_variant(capability: tuple[int, int], shared_bytes: int) -> Variant:
    """Return the variant for a GPU of at least LEAST_CAPABILITY and LEAST_SHARED_BYTES: the one with the largest rings, bulk copies first."""
    return next(variant for variant in VARIANTS if variant.runs_on(capability, shared_bytes))


def variant_of(device: torch.device) -> Variant:
    return choose_variant(*_facts(device))


def path_on(device: torch.device) -> Path:
    """Return where the library for a device that can run it lies, or will lie once it is compiled."""
    return cached_path(_architecture(device), variant_of(device))


def fall_back(what: str, reason: str) -> None:
    """Count a product that Triton's kernels take because these cannot, and say so the first time."""
    _n_fallen_back[what] += 1
    tell_fall_back(what, reason)


def tell_fall_back(what: str, reason: str) -> None:
    """Say that Triton's kernels will take a product, before it comes to that."""
    say_once(f"{what}: slower Triton kernels run, not those in CUDA C++: {reason}")


def fallen_back() -> dict[str, int]:
    """Return how often `fall_back` was called in this process, by product. A launch within a CUDA graph counts when it is captured."""
    return dict(_n_fallen_back)


@cache
def say_once(text: str) -> None:
    """Warn, the first time that this is said in this process."""
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or next((place for place in _NVCC_PLACES if os.access(place, os.X_OK)), None)


def cached_path(architecture: str, variant: Variant = LARGE) -> Path:
    """Return where the library of the present source lies once it is compiled."""
    parts = (SOURCE.read_text(), architecture, torch.__version__, *NVCC_FLAGS, *variant.flags)
    return cached_library(f"products-{architecture}-{variant.name}", parts)


def compiled(architecture: str, variant: Variant = LARGE) -> Path:
    """Compile the kernels for an architecture such as sm_90, unless it was done before, and return the library's path.

    Raises CalledProcessError if nvcc fails, OSError if it is missing or the cache directory cannot be written.
    """
    path = cached_path(architecture, variant)
    if not path.exists():
        warnings.warn(f"compiling the CUDA C++ kernels for {architecture}, once; half a minute", RuntimeWarning, stacklevel=2)
        target = f"-gencode=arch=compute_{architecture[3:]},code={architecture}"
        compile_once(path, lambda made: [find_nvcc() or "nvcc", *NVCC_FLAGS, *variant.flags, target, "-o", str(made), str(SOURCE)])
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


def _facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return a device's compute capability, and the bytes of shared memory that a block may have."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
