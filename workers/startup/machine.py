"""What a machine has for a model: memory of host and GPU, cores, and the bus between them."""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ktqueue.workers.startup.device import missing_cuda
from ktqueue.workers.startup.host_memory import available_memory

_COPY_BYTES = 128 << 20  # of one measured copy
_COPIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`total` and `free` memory in bytes; `bus`: bytes a second from pinned host memory, 0 where it is not known."""

    name: str
    total: int
    free: int
    bus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`host_available`: bytes that new work may take. `gpu`: the first one; None: `no_gpu` says why."""

    cpu: str
    cores: int
    host_available: int
    gpu: Gpu | None
    no_gpu: str = ""


def look(device: str | None = None) -> Machine:
    """This machine, with the GPU that `device` names, else the first. Takes a part of a second with a GPU."""
    reason = missing_cuda()
    gpu = None
    if reason is None and device != "cpu":
        gpu = _gpu(torch.device(device or "cuda"))
    return Machine(
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        host_available=available_memory(),
        gpu=gpu,
        no_gpu=reason or "",
    )


def _gpu(device: torch.device) -> Gpu:
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(name=torch.cuda.get_device_name(device), total=total, free=free, bus=_bus(device))


def _bus(device: torch.device) -> float:
    """Bytes a second of copies from pinned memory, the best of a few; 0 where the GPU has no room for one."""
    try:
        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError:  # out of memory is one of them
        return 0.0
    best = float("inf")
    for _ in range(_COPIES):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return _COPY_BYTES / best


def cpu_name() -> str:
    """The CPU's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
