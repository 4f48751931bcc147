"""Names a process uniquely, across machines and containers. Knows no Redis."""

import socket
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")  # differs after each start of each machine; proc(5)
NAMESPACE = Path("/proc/self/ns/pid")  # the namespace of our process ids; pid_namespaces(7)


def process_name(pid: int, namespace: Path = NAMESPACE) -> str:
    """A unique name for the process with this id in `namespace`, which is ours by default.

    A host name is not enough: machines and containers may share one, and small process ids repeat in each container.
    """
    try:
        place = f"{BOOT.read_text().strip()}:{namespace.stat().st_ino}"
    except OSError:  # not Linux
        place = socket.gethostname()
    return f"{place}:{pid}"
