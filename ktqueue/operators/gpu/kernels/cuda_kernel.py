"""A kernel in CUDA C++: compiled by the NVRTC that torch brings, kept in Triton's cache, and launched by the driver.

torch loads the code. Its compiler and launcher of such kernels are not used: they keep nothing on disk, and launch none
early (see operation.py). Compiling needs no GPU and may run in threads.
"""

import ctypes
import hashlib
import logging
import re
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ktqueue.operators.gpu.kernels.operation import compilation, triton

logger = logging.getLogger(__name__)

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


def machine_code(source: Path, options: Sequence[str], architecture: str, compiler: ctypes.CDLL) -> bytes:
    """Compile for a GPU of `architecture`, such as "90a". compiler: NVRTC. Raises RuntimeError with its words. Logs a
    warning if products of warpgroups will wait for each other, which no result would show."""
    words = [f"--gpu-architecture=sm_{architecture}", f"-I{source.parent}", *options]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    name = source.name.encode()

    def words_of_compiler() -> str:
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        return log.value.decode()

    status = compiler.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), name, 0, None, None)
    if status:
        raise RuntimeError(f"NVRTC error {status} before it compiles {source.name}")
    try:
        array = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        if compiler.nvrtcCompileProgram(program, len(words), array):
            raise RuntimeError(f"{source.name} does not compile:\n{words_of_compiler()}")
        for line in words_of_compiler().splitlines():
            if "are serialized" in line:
                logger.warning("%s is slower than it could be: %s", source.name, line)
        compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvrtc() -> ctypes.CDLL:
    """The compiler that torch brings. Raises OSError if there is none."""
    return ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}")


def _with_headers(source: Path) -> list[Path]:
    """The source and all headers of ours that it includes, also by way of others."""
    found = [source.resolve()]
    for path in found:
        included = [(path.parent / name).resolve() for name in re.findall(r'^#include "(.+)"', path.read_text(), re.M)]
        found += [header for header in dict.fromkeys(included) if header not in found]
    return found


def kept_code(
    source: Path,
    options: Sequence[str],
    architecture: str,
    compiler: ctypes.CDLL | None = None,
    *,
    missing: list[str] | None = None,
) -> bytes:
    """As `machine_code`, from Triton's cache on disk if it is there, which depends on all that is compiled and on the
    compiler's version. compiler: None: that of torch. missing: receives the source's name if it is not there."""
    compiler = compiler or _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    texts = [path.read_text() for path in _with_headers(source)]
    parts = [*texts, *options, architecture, f"{major.value}.{minor.value}"]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    kept, name = triton.runtime.cache.get_cache_manager(key), f"{source.stem}.cubin"
    path = kept.get_file(name)
    if path is not None:
        return Path(path).read_bytes()
    if missing is not None:
        missing.append(source.stem)
    code = machine_code(source, options, architecture, compiler)
    kept.put(code, name, binary=True)
    return code


def _argument(value: torch.Tensor | int | bytes) -> Any:
    if isinstance(value, bytes):
        return ctypes.create_string_buffer(value, len(value))
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_void_p(value.data_ptr())


class CudaKernel:
    """A kernel of `source`, compiled at its first launch and loaded to the current device.

    options: of the compiler; name: that of the function; threads: of a program; shared_bytes: shared memory of a
    program that is given at the launch; architecture: as for `machine_code`; None: that of the current device.
    """

    def __init__(
        self,
        source: Path,
        options: Sequence[str],
        name: str,
        threads: int,
        shared_bytes: int,
        architecture: str | None = None,
    ) -> None:
        architecture = architecture or "{}{}".format(*torch.cuda.get_device_capability())
        self._compile = partial(kept_code, source, options, architecture)
        self._name, self._threads, self._shared_bytes = name, threads, shared_bytes
        self._code: Future[bytes] | None = None
        self._kernel: Any = None
        self._driver: Any = None

    def compile_in(self, threads: Executor, missing: list[str] | None = None) -> None:
        """Begin to compile the kernel in a thread, if that has not begun. The first launch waits for it. missing: see
        `kept_code`."""
        self._code = self._code or threads.submit(self._compile, missing=missing)

    def _load(self) -> None:
        """Raises RuntimeError with the compiler's or the driver's words."""
        code = self._compile() if self._code is None else self._code.result()
        self._driver = ctypes.CDLL("libcuda.so.1")
        loaded: Any = torch.cuda._utils._cuda_load_module(code, [self._name])
        self._kernel = loaded[self._name]
        # Less would not let the kernel's own memory pass 48 KiB.
        self._kernel.set_shared_memory_config(max(self._shared_bytes, _DEFAULT_SHARED_BYTES))
        # All of it that can be had: otherwise the driver may leave room for fewer programs than fit.
        self._check(self._driver.cuFuncSetAttribute(self._kernel.func, _SHARED_CARVEOUT, 100))

    def launch(
        self, grid: tuple[int, int], arguments: Sequence[torch.Tensor | int | bytes], *, early: bool = False
    ) -> None:
        """Launch `grid` programs in torch's current stream. arguments: contiguous tensors, as pointers, int32, and
        structures, as bytes.

        early: the kernel before may still run. Then the kernel must wait for it by itself. Inside
        `compiled_side_by_side` a kernel that is not compiled yet begins to be, in a thread, and nothing runs.
        """
        if self._kernel is None:
            if (beside := compilation()) is not None:
                self.compile_in(*beside)
                return
            self._load()
        values = [_argument(value) for value in arguments]
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
