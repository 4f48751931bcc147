"""Names of threads in `top -H`, `perf` and debuggers. Python sets them itself from 3.14 on."""

from pathlib import Path

MOST_BYTES = 15  # Linux cuts longer names
_COMM = Path("/proc/thread-self/comm")


def name_thread(name: str) -> None:
    """Name the calling thread, as far as the system allows. Usable as the initializer of a thread pool."""
    try:
        _COMM.write_text(name[:MOST_BYTES])
    except OSError:  # no /proc, or none that can be written
        return
