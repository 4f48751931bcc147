"""A name for a process that no other has, on whatever machine and in whatever container. Knows no Redis."""

import socket
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one after each start of each machine; proc(5)
NAMESPACE = Path("/proc/self/ns/pid")  # whose process numbers we see; pid_namespaces(7)


def process_name(pid: int) -> str:
    """Of the process with that number, as this process counts them.

    Host names are no help: machines and containers may share one, and small process numbers come again in each
    container.
    """
    try:
        place = f"{BOOT.read_text().strip()}:{NAMESPACE.stat().st_ino}"
    except OSError:  # not Linux
        place = socket.gethostname()
    return f"{place}:{pid}"
