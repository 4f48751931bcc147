"""A kernel in CUDA C++: compiled by the NVRTC that torch brings, and launched by the driver.

torch compiles and loads the code. Its launcher is not used, since it cannot launch a kernel early: see operation.py.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

_SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_DEFAULT_SHARED_BYTES = 48 << 10


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with an integer as its value."""

    _fields_ = (("id", ctypes.c_int), ("_padding", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class CudaKernel:
    """A compiled kernel.

    source: its file; name: that of the function; options: of the compiler; threads: of a program; shared_bytes: shared
    memory of a program that is given at the launch. Raises RuntimeError with the compiler's or the driver's words.
    """

    def __init__(self, source: Path, name: str, options: Sequence[str], threads: int, shared_bytes: int) -> None:
        self._kernel = torch.cuda._compile_kernel(source.read_text(), name, nvcc_options=list(options))
        # Less would not let the kernel's own memory pass 48 KiB.
        self._kernel.set_shared_memory_config(max(shared_bytes, _DEFAULT_SHARED_BYTES))
        self._threads, self._shared_bytes = threads, shared_bytes
        self._driver = ctypes.CDLL("libcuda.so.1")
        # All of it that can be had: otherwise the driver may leave room for fewer programs than fit.
        self._check(self._driver.cuFuncSetAttribute(self._kernel.func, _SHARED_CARVEOUT, 100))

    def launch(self, grid: tuple[int, int], arguments: Sequence[torch.Tensor | int], *, early: bool = False) -> None:
        """Launch `grid` programs in torch's current stream. arguments: contiguous tensors, as pointers, and int32.

        early: the kernel before may still run. Then the kernel must wait for it by itself.
        """
        values = [
            ctypes.c_int(value) if isinstance(value, int) else ctypes.c_void_p(value.data_ptr()) for value in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attribute = _Attribute(id=_EARLY, value=1)
        config = _Launch(
            (*grid, 1), (self._threads, 1, 1), self._shared_bytes,
            torch.cuda.current_stream().cuda_stream, ctypes.pointer(attribute), int(early),
        )  # fmt: skip
        self._check(self._driver.cuLaunchKernelEx(ctypes.byref(config), self._kernel.func, pointers, None))

    def _check(self, status: int) -> None:
        if status:
            words = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(words))
            raise RuntimeError(f"CUDA error {status}: {(words.value or b'unknown').decode()}")
