"""Host memory that a new process may use: what the kernel calls available, limited by control groups."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def available_memory(root: Path = ROOT) -> int:
    """Return it in bytes. `root`: the folder that has /proc and /sys."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min([available, *_free_in_groups(root)]))


def _free_in_groups(root: Path) -> Iterator[int]:
    """Bytes that each control group of this process, and each of its parents, may still use. Reads versions 1 and 2."""
    try:
        entries = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for entry in entries:
        number, controllers, path = entry.split(":", 2)
        if number == "0":
            top, limit_name, used_name, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit_name, used_name, prefix = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            )
        else:
            continue
        group = top / path.lstrip("/")
        while True:
            try:
                limit = int((group / limit_name).read_text(encoding="ascii"))
                used = int((group / used_name).read_text(encoding="ascii"))
                yield limit - used + _reclaimable(group / "memory.stat", prefix)
            except (OSError, ValueError):  # a container sees another path, or the limit is "max"
                pass
            if group == top:
                break
            group = group.parent


def _reclaimable(stat: Path, prefix: str) -> int:
    """Bytes of a group's used memory that the kernel can reclaim: all inactive and half of the active file cache."""
    values = dict(line.split()[:2] for line in stat.read_text(encoding="ascii").splitlines())
    return int(values.get(f"{prefix}inactive_file", 0)) + int(values.get(f"{prefix}active_file", 0)) // 2
