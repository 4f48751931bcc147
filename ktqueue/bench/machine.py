"""Limits of this machine: read bandwidth for each level of memory, peak arithmetic for each instruction set.

They are measured on the kernels' own threads, so that kernels are compared with what the same threads could do.
"""

from dataclasses import dataclass

from ktqueue.operators import native
from ktqueue.workers.startup.machine import cpu_name
from ktqueue.workers.startup.memory_bandwidth import arena_bytes, cache_sizes, read_bandwidth

MIB = 1 << 20
CACHE_BYTES_READ = 512 * MIB  # of one measurement of a cache


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Read bandwidth of one level of memory, in bytes per second. All threads together read `size` bytes."""

    level: str  # L2, L3, DRAM
    size: int
    one_thread: float
    all_threads: float


@dataclass(frozen=True, slots=True)
class Peak:
    """Arithmetic of one instruction set, in operations per second; a multiply-add is two."""

    isa: str
    arithmetic: str
    instruction: str
    one_thread: float
    all_threads: float


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The limits of this machine, measured with `threads` threads."""

    cpu: str
    cpus: int
    threads: int
    caches: dict[str, int]  # level to bytes, all caches of the level together
    bandwidths: list[Bandwidth]
    peaks: list[Peak]


class Probes:
    """Probes that are run beside a figure. The memory that they read is freed with this object.

    `memory`: bytes of the DRAM probe, by default those of `arena_bytes`.
    `caches`: the result of `cache_sizes()`, which is called if it is not given.
    """

    def __init__(self, memory: int | None = None, caches: dict[str, int] | None = None) -> None:
        self.caches = cache_sizes() if caches is None else caches
        self._memory = native.ReadProbe(memory or arena_bytes(self.caches))

    def bandwidth(self, *, threads: int = 0, repeats: int = 2) -> float:
        """Measure DRAM bytes per second: the best of hardware prefetch alone and with software prefetch."""
        return read_bandwidth(self._memory, threads=threads, repeats=repeats)

    def cache_bandwidth(self, size: int, *, threads: int = 0) -> float:
        """Measure the bytes per second of reading the same `size` bytes again and again."""
        return self._memory.measure(size=size, threads=threads, rounds=max(1, CACHE_BYTES_READ // size), repeats=3)

    def peak(self, isa: str, arithmetic: str, *, threads: int = 0, repeats: int = 3) -> float:
        """Measure operations per second: the best of `repeats` runs of 10 ms."""
        return native.peak(isa, arithmetic, threads=threads, seconds=0.01, repeats=repeats)

    def machine(self) -> MachineLimits:
        """Measure all limits once."""
        threads = native.threads()
        bandwidths = []
        for level, size in self._cache_ranges(threads):
            single, together = (self.cache_bandwidth(size // n, threads=threads // n) for n in (threads, 1))
            bandwidths.append(Bandwidth(level, size, single, together))
        single, together = (self.bandwidth(threads=n, repeats=5) for n in (1, threads))
        bandwidths.append(Bandwidth("DRAM", self._memory.bytes, single, together))
        peaks = [
            Peak(
                isa, arithmetic, instruction, *(self.peak(isa, arithmetic, threads=n, repeats=8) for n in (1, threads))
            )
            for isa, arithmetic, instruction in native.peaks()
        ]
        return MachineLimits(cpu_name(), native.default_threads(), threads, self.caches, bandwidths, peaks)

    def _cache_ranges(self, threads: int) -> list[tuple[str, int]]:
        """(level, bytes to read) of each cache beyond the first: half of it.

        Levels are left out if that half fits the cache before, or does not fit the probe's memory.
        """
        ranges, before = [], self.caches.get("L1", 0)
        for level in ("L2", "L3"):
            size = self.caches.get(level, 0) // 2
            if before < size >= threads * MIB // 4 and size <= self._memory.bytes:
                ranges.append((level, size))
            before = max(before, 2 * size)
        return ranges
