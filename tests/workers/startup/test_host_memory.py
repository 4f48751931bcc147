"""Available memory: the machine's, limited by control groups."""

from pathlib import Path

import pytest

from ktqueue.workers.startup.host_memory import available_memory

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 99999 kB\nMemAvailable:   1048576 kB\n"}
STAT = f"anon 5\ninactive_file {4 * MIB}\nactive_file {8 * MIB}\n"


def group(folder: str, limit: object, used: int) -> dict[str, str]:
    place = f"sys/fs/cgroup{folder}"
    return {f"{place}/memory.max": str(limit), f"{place}/memory.current": str(used), f"{place}/memory.stat": STAT}


def old_group(folder: str, limit: int, used: int) -> dict[str, str]:
    place = f"sys/fs/cgroup/memory{folder}"
    stat = f"inactive_file 1\ntotal_inactive_file {4 * MIB}\ntotal_active_file {8 * MIB}\n"
    return {
        f"{place}/memory.limit_in_bytes": str(limit),
        f"{place}/memory.usage_in_bytes": str(used),
        f"{place}/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1024),
        ({"proc/self/cgroup": "0::/a/b\n"}, 1024),
        ({"proc/self/cgroup": "0::/a/b\n", **group("/a/b", "max", 7)}, 1024),
        ({"proc/self/cgroup": "0::/a/b\n", **group("/a/b", 100 * MIB, 60 * MIB)}, 100 - 60 + 4 + 8 // 2),
        ({"proc/self/cgroup": "0::/a/b\n", **group("/a/b", "max", 7), **group("/a", 50 * MIB, 20 * MIB)}, 38),
        ({"proc/self/cgroup": "0::/../x\n", **group("", 50 * MIB, 20 * MIB)}, 38),  # as a container sees it
        ({"proc/self/cgroup": "4:memory:/j\n0::/\n", **old_group("/j", 90 * MIB, 50 * MIB)}, 48),
        ({"proc/self/cgroup": "0::/a\n", **group("/a", 10 * MIB, 90 * MIB)}, 0),
    ],
)
def test_available_memory_respects_control_groups(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert available_memory(write(tmp_path, {**MACHINE, **files})) == expected * MIB


def test_this_machine_has_available_memory() -> None:
    assert 0 < available_memory() < 1 << 50
