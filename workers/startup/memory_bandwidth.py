"""The bandwidth of the host's memory, measured on the kernels' own threads."""

from pathlib import Path

from ktqueue.operators import native
from ktqueue.workers.startup.host_memory import available_memory

ARENA_BYTES = 1 << 30
ARENA_CACHES = 4
PREFETCH_BYTES = 4096  # ahead
CACHES = Path("/sys/devices/system/cpu")
_SPARE = 4  # times the arena must be free, or nothing is measured


def memory_bandwidth() -> float | None:
    """Measure how many bytes per second all kernel threads read together, in a fraction of a second.

    None if too little memory is free.
    """
    size = arena_bytes(cache_sizes())
    if available_memory() < _SPARE * size:
        return None
    return read_bandwidth(native.ReadProbe(size), threads=0, repeats=2)


def read_bandwidth(memory: native.ReadProbe, *, threads: int, repeats: int) -> float:
    """Measure bytes per second: the best of hardware prefetch alone and with software prefetch."""
    return max(memory.measure(threads=threads, repeats=repeats, prefetch=prefetch) for prefetch in (0, PREFETCH_BYTES))


def arena_bytes(caches: dict[str, int]) -> int:
    """Bytes to read for a measurement that caches do not help: ARENA_BYTES, but at least ARENA_CACHES times the last
    cache."""
    return max(ARENA_BYTES, ARENA_CACHES * last_cache(caches))


def cache_sizes(folder: Path = CACHES) -> dict[str, int]:
    """Bytes of the data caches by level, all caches of a level together, from Linux; empty if it has no data."""
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
    """Bytes of the largest cache of `cache_sizes()`; 0 if none is known."""
    return max(sizes.values(), default=0)
