"""What every operation of this package needs: Triton, the choice between kernel and twin, and its shape errors.

This is the door to Triton. An operation is one file with its kernel, its launcher and its plain torch twin. Such a
file can also be imported without Triton: kernels are then defined, but cannot be launched.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Never

import torch

from ktqueue.operators.gpu.device import is_gpu, launches_dependents

__all__ = [
    "INTERPRETED",
    "check_fits",
    "compilation",
    "compiled_side_by_side",
    "dependent_launches",
    "early_launch_options",
    "is_last",
    "kernels_on_any_device",
    "launch_after_all",
    "launch_options",
    "let_next_begin",
    "runs_kernel",
    "tl",
    "triton",
    "wait_for_previous",
]


class MissingTriton:
    """Stands for `triton` and `triton.language`. Launching a kernel raises RuntimeError."""

    def __getattr__(self, name: str) -> "MissingTriton":
        return self

    def __call__(self, *_: object, **__: object) -> "MissingTriton":
        return self

    def __getitem__(self, grid: object) -> Never:
        raise RuntimeError("GPU kernels need the package triton, which is not installed")


triton: Any
tl: Any
try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
except ImportError:
    triton = tl = MissingTriton()

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on the CPU."""

_ANY_DEVICE = ContextVar("kernels_on_any_device", default=False)


def runs_kernel(x: torch.Tensor) -> bool:
    """Whether an operation on `x` launches its kernel. Otherwise its torch twin computes the result."""
    return is_gpu(x.device) or _ANY_DEVICE.get()


@contextmanager
def kernels_on_any_device() -> Iterator[None]:
    """Launch kernels for CPU tensors too, as Triton's interpreter needs it."""
    token = _ANY_DEVICE.set(True)
    try:
        yield
    finally:
        _ANY_DEVICE.reset(token)


_DEPENDENT = ContextVar("dependent_launches", default=False)


@contextmanager
def dependent_launches(on: bool) -> Iterator[None]:
    """If `on`, launch kernels that call `wait_for_previous` before the kernel before them has ended: programmatic
    dependent launch. Needs a GPU of compute capability 9.0 or later."""
    token = _DEPENDENT.set(on)
    try:
        yield
    finally:
        _DEPENDENT.reset(token)


_BRANCHES = ContextVar("branches", default=False)


def launch_after_all() -> None:
    """Let the next kernel begin after the end of all kernels that its stream waits for. Call it where a stream waits
    for another one, since only the kernel before in the same stream can let the next one begin early."""
    _BRANCHES.set(True)


def launch_options() -> dict[str, bool]:
    """Options of a launch whose kernel has the constant WAITS and passes it to `wait_for_previous`."""
    early = _DEPENDENT.get() and not _BRANCHES.get()
    _BRANCHES.set(False)
    return {"WAITS": True, "launch_pdl": True} if early else {"WAITS": False}


def early_launch_options(x: torch.Tensor) -> dict[str, bool]:
    """As `launch_options`, of a launch that is not captured and always may begin early, if the device of x can."""
    with dependent_launches(launches_dependents(x.device)):
        return launch_options()


class _NothingToRun:
    """In place of a kernel whose launches are noted only."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        """See CompiledKernel."""

    def run(self, *_: object) -> None:
        """See CompiledKernel."""


class Compilation(NamedTuple):
    """Threads in which kernels are compiled, and the names of those that the disk did not have."""

    threads: Executor
    missing: list[str]


_COMPILATION = ContextVar[Compilation | None]("compilation", default=None)


def compilation() -> Compilation | None:
    """How kernels are compiled inside `compiled_side_by_side`, which waits for the threads. None: outside of it."""
    return _COMPILATION.get()


@contextmanager
def compiled_side_by_side() -> Iterator[list[str]]:
    """Launches of kernels that are not compiled yet compile them, each in a thread, and run nothing. At the end all are
    compiled. Other kernels are launched. Gives the names of those that the cache on the disk did not have.

    Raises what a compilation raises. Not inside another such block.
    """
    missing: list[str] = []

    class Mode(triton.AsyncCompileMode):  # type: ignore[misc]
        def submit(self, *arguments: Any) -> _NothingToRun:
            super().submit(*arguments)
            return _NothingToRun()

    def note(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            missing.append(src.name)

    before, triton.knobs.compilation.listener = triton.knobs.compilation.listener, note
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads, Mode(threads):
            token = _COMPILATION.set(Compilation(threads, missing))
            try:
                yield missing
            finally:
                _COMPILATION.reset(token)
    finally:
        triton.knobs.compilation.listener = before


@triton.jit
def wait_for_previous(WAITS: tl.constexpr, BEGINS: tl.constexpr = True):
    """Wait until the kernel before this one has ended and its writes can be read. Then let the next kernel begin.

    A kernel with WAITS must call it in every program, before it reads what a step writes and before its first write. So
    whoever has waited knows that all earlier kernels have ended too, not only the one before. BEGINS: False: the next
    kernel begins later, when all programs have called `let_next_begin` or have ended.
    """
    if WAITS and not INTERPRETED:
        tl.extra.cuda.gdc_wait()
        if BEGINS:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next_begin(WAITS: tl.constexpr):
    """Let the next kernel begin. Call it after `wait_for_previous`, behind loads that the next kernel's would delay."""
    if WAITS and not INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def is_last(counter, programs):
    """Whether this program is the last of `programs` programs to call this, so that it can read what all of them wrote.

    counter: int32 in global memory, 0 before the first and after the last. Every program must have waited for the
    kernel before: see wait_for_previous. The addition of one thread releases what the program wrote before the
    barrier, and acquires what the others released.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    tl.debug_barrier()
    if last:
        tl.store(counter, 0)
    return last


def check_fits(fits: bool, name: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError with the shapes and dtypes of `tensors` unless `fits`."""
    if not fits:
        shapes = ", ".join(f"{key} {list(x.shape)} {x.dtype}" for key, x in tensors.items() if x is not None)
        raise ValueError(f"{name} does not take {shapes}")
