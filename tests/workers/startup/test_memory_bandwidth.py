"""The sizes of caches, and the bandwidth of the memory behind them."""

from pathlib import Path

import pytest

from ktqueue.workers.startup import memory_bandwidth
from ktqueue.workers.startup.memory_bandwidth import ARENA_BYTES, arena_bytes, cache_sizes


def test_caches_are_read_from_sysfs(tmp_path: Path) -> None:
    def cache(cpu: int, index: int, level: int, kind: str, size: str, shared: int | str) -> None:
        folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, value in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{value}\n")

    for cpu in range(4):
        cache(cpu, 0, 1, "Data", "48K", cpu)
        cache(cpu, 1, 1, "Instruction", "32K", cpu)
        cache(cpu, 2, 2, "Unified", "1024K", f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}")
        cache(cpu, 3, 3, "Unified", "32768K", "0-3")
    assert cache_sizes(tmp_path) == {"L1": 4 * 48 << 10, "L2": 2 << 20, "L3": 32 << 20}
    assert cache_sizes(tmp_path / "absent") == {}


def test_more_is_read_than_caches_hold() -> None:
    assert arena_bytes({}) == ARENA_BYTES
    assert arena_bytes({"L2": 1 << 20, "L3": 1 << 30}) == 4 << 30


def test_nothing_is_measured_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_bandwidth, "available_memory", lambda: 3 * ARENA_BYTES)
    assert memory_bandwidth.memory_bandwidth() is None
