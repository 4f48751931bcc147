"""The resources of a machine: memory of host and GPU, CPU cores, and the bandwidth between host and GPU."""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ktqueue.operators.gpu.device import has_warpgroups, multiplies_groups
from ktqueue.workers.startup.device import find_cuda, missing_cuda
from ktqueue.workers.startup.host_memory import available_memory

_COPY_BYTES = 128 << 20  # size of a measured copy
_COPIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU. `total` and `free`: memory in bytes. `bus`: bytes per second from pinned host memory, 0 if unknown.
    `decodes`: long steps may decode a layer's experts. `warpgroups`: they do not if these multiply packed ones."""

    name: str
    total: int
    free: int
    bus: float = 0.0
    decodes: bool = False
    warpgroups: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineResources:
    """Resources of a machine. `host_available`: bytes free for a new process. If `gpu` is None, `no_gpu` says why."""

    cpu: str
    cores: int
    host_available: int
    gpu: Gpu | None
    no_gpu: str = ""


def detect_resources(device: str | None = None) -> MachineResources:
    """Examine this machine and the GPU that `device` names, else its first. Copies memory to measure a GPU's bus."""
    reason = missing_cuda(find_cuda())
    gpu = None
    if reason is None and device != "cpu":
        gpu = _gpu(torch.device(device or "cuda"))
    return MachineResources(
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        host_available=available_memory(),
        gpu=gpu,
        no_gpu=reason or "",
    )


def _gpu(device: torch.device) -> Gpu:
    free, total = torch.cuda.mem_get_info(device)
    name, bus = torch.cuda.get_device_name(device), bus_bandwidth(device)
    decodes, warpgroups = multiplies_groups(device), has_warpgroups(device)
    return Gpu(name=name, total=total, free=free, bus=bus, decodes=decodes, warpgroups=warpgroups)


def bus_bandwidth(device: torch.device) -> float:
    """Measure copies from pinned memory. Returns the best bytes per second, or 0 if the GPU has no room for a copy."""
    try:
        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError:  # includes torch.OutOfMemoryError
        return 0.0
    best = float("inf")
    for _ in range(_COPIES):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return _COPY_BYTES / best


def cpu_name() -> str:
    """The CPU's model name, from /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
