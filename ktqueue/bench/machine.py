"""The limits of the machine that this runs on: read bandwidth by level of memory, peak arithmetic by instruction set.

Uses the kernels' own threads, so that kernels are compared with what the same threads could do.
"""

from dataclasses import dataclass
from pathlib import Path

from ktqueue.operators import native
from ktqueue.workers.startup.machine import cpu_name

MIB = 1 << 20
ARENA_BYTES = 1024 * MIB  # of the DRAM probe, where that is ARENA_CACHES times the last cache
ARENA_CACHES = 4
PREFETCH_BYTES = 4096  # ahead
CACHE_BYTES_READ = 512 * MIB  # of one measurement of a cache
CACHES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Read bandwidth of one level of memory, in bytes a second; `size` bytes are read by all threads together."""

    level: str  # L2, L3, DRAM
    size: int
    one_thread: float
    all_threads: float


@dataclass(frozen=True, slots=True)
class Peak:
    """Arithmetic of one instruction set, in operations a second; a multiply-add is two."""

    isa: str
    arithmetic: str
    instruction: str
    one_thread: float
    all_threads: float


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine as measured with `threads` threads."""

    cpu: str
    cpus: int
    threads: int
    caches: dict[str, int]  # level to bytes, all instances of the CPUs of this machine together
    bandwidths: list[Bandwidth]
    peaks: list[Peak]


class Probes:
    """The probes to take beside a figure. Holds the memory that it reads; freed with the object."""

    def __init__(self) -> None:
        self.caches = cache_sizes()
        self._memory = native.ReadProbe(max(ARENA_BYTES, ARENA_CACHES * last_cache(self.caches)))

    def bandwidth(self, *, threads: int = 0, repeats: int = 2) -> float:
        """DRAM bytes a second now: the better of hardware prefetch alone and with software's, each of `repeats`."""
        return max(
            self._memory.measure(threads=threads, repeats=repeats, prefetch=prefetch)
            for prefetch in (0, PREFETCH_BYTES)
        )

    def cache_bandwidth(self, size: int, *, threads: int = 0) -> float:
        """Bytes a second of reading the same `size` bytes over and over."""
        return self._memory.measure(size=size, threads=threads, rounds=max(1, CACHE_BYTES_READ // size), repeats=3)

    def peak(self, isa: str, arithmetic: str, *, threads: int = 0, repeats: int = 3) -> float:
        """Operations a second now, the best of `repeats` looks of 10 ms."""
        return native.peak(isa, arithmetic, threads=threads, seconds=0.01, repeats=repeats)

    def machine(self) -> Machine:
        """Everything, once."""
        threads = native.threads()
        bandwidths = []
        for level, size in self._cache_ranges(threads):
            one, every = (self.cache_bandwidth(size // n, threads=threads // n) for n in (threads, 1))
            bandwidths.append(Bandwidth(level, size, one, every))
        one, every = (self.bandwidth(threads=n, repeats=5) for n in (1, threads))
        bandwidths.append(Bandwidth("DRAM", self._memory.bytes, one, every))
        peaks = [
            Peak(
                isa, arithmetic, instruction, *(self.peak(isa, arithmetic, threads=n, repeats=8) for n in (1, threads))
            )
            for isa, arithmetic, instruction in native.peaks()
        ]
        return Machine(cpu_name(), native.default_threads(), threads, self.caches, bandwidths, peaks)

    def _cache_ranges(self, threads: int) -> list[tuple[str, int]]:
        """What to read of each cache beyond the first: half of it, if that does not fit the one before."""
        ranges, before = [], self.caches.get("L1", 0)
        for level in ("L2", "L3"):
            size = self.caches.get(level, 0) // 2
            if before < size >= threads * MIB // 4:
                ranges.append((level, size))
            before = max(before, 2 * size)
        return ranges


def cache_sizes(folder: Path = CACHES) -> dict[str, int]:
    """Bytes of the data caches by level, all instances together, as Linux tells; empty where it does not."""
    found: dict[tuple[str, str], int] = {}  # (level, CPUs that share the instance) to bytes
    for index in folder.glob("cpu[0-9]*/cache/index*"):
        try:
            level, kind, size, shared = (
                (index / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            found[f"L{level}", shared] = int(size[:-1]) << 10
    sizes: dict[str, int] = {}
    for (level, _), count in sorted(found.items()):
        sizes[level] = sizes.get(level, 0) + count
    return sizes


def last_cache(sizes: dict[str, int]) -> int:
    """Bytes of the largest level of `cache_sizes()`; 0 if none is known."""
    return max(sizes.values(), default=0)
