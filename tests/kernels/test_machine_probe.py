"""The probes of the machine's limits return figures and refuse with a reason. No figure is compared with another."""

import math
import platform
from typing import Any

import pytest

from ktqueue.operators import native

MIB = 1 << 20
ARITHMETIC = {
    "scalar": {"int8", "fp32"},
    "avx2": {"int8", "fp32"},
    "avxvnni": {"int8"},
    "avx512": {"int8", "bf16", "fp32"},
    "amx": {"int8", "bf16"},
}


def cpu_flags() -> set[str]:
    """Return the CPU flags that Linux reports."""
    with open("/proc/cpuinfo") as file:  # noqa: PTH123
        return set(next((line for line in file if line.startswith("flags")), "").split())


def offered() -> dict[str, set[str]]:
    """Return the arithmetic of each instruction set that this machine has."""
    found: dict[str, set[str]] = {}
    for isa, arithmetic, instruction in native.peaks():
        assert instruction
        found.setdefault(isa, set()).add(arithmetic)
    return found


def test_probes_match_the_cpu_flags_of_linux() -> None:
    found = offered()
    assert found == {isa: ARITHMETIC[isa] for isa in found}
    flags = cpu_flags()
    if platform.machine() != "x86_64" or not flags:
        pytest.skip("no x86 flags to compare with")
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}
    assert ("avx2" in found) == ({"avx2", "fma", "f16c"} <= flags)
    assert ("avxvnni" in found) == ({"avx2", "avx_vnni"} <= flags)
    assert ("avx512" in found) == (avx512 <= flags)
    assert ("amx" in found) <= ({"amx_tile", "amx_int8", "amx_bf16"} <= flags)  # Linux may refuse the tiles


@pytest.mark.parametrize("isa", ARITHMETIC)
def test_each_instruction_set_has_a_peak(isa: str, two_threads: None) -> None:
    if isa not in offered():
        with pytest.raises(ValueError, match=f"this CPU has no {isa}"):
            native.peak(isa, "int8", seconds=0.001, repeats=1)
        return
    for arithmetic in ("int8", "bf16", "fp32"):
        if arithmetic in ARITHMETIC[isa]:
            for threads in (0, 1, 2):
                figure = native.peak(isa, arithmetic, threads=threads, seconds=0.001, repeats=1)
                assert figure > 0 and math.isfinite(figure)
        else:
            with pytest.raises(ValueError, match=f"{isa} has no {arithmetic} arithmetic"):
                native.peak(isa, arithmetic, seconds=0.001, repeats=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("avx1024", "int8"), "isa must be one of scalar, .*got 'avx1024'"),
        (("scalar", "int4"), "arithmetic must be int8, bf16 or fp32, got 'int4'"),
        (("scalar", "fp32", 0.0), "seconds must be above 0"),
        (("scalar", "fp32", float("nan")), "seconds must be above 0"),
        (("scalar", "fp32", 0.001, 3), "threads must be at most the pool's 2, got 3"),
        (("scalar", "fp32", 0.001, 0, 0), "repeats must be at least 1"),
    ],
)
def test_a_peak_is_refused_with_a_reason(arguments: tuple[Any, ...], message: str, two_threads: None) -> None:
    defaults: tuple[Any, ...] = (0.001, 0, 1)
    isa, arithmetic, seconds, threads, repeats = (*arguments, *defaults[len(arguments) - 2 :])
    with pytest.raises(ValueError, match=message):
        native.peak(isa, arithmetic, seconds=seconds, threads=threads, repeats=repeats)


def test_the_read_probe_measures_a_range_of_memory(two_threads: None) -> None:
    probe = native.ReadProbe(5 * MIB)
    assert probe.bytes == 8 * MIB  # a multiple of 2 MiB for each of two threads
    for prefetch in (0, 4096):
        for threads in (0, 1, 2):
            assert probe.measure(threads=threads, prefetch=prefetch) > 0
    assert probe.measure(size=64 << 10, rounds=10, repeats=1) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 4 * MIB + 1}, "size must be at most the probe's 4194304 bytes"),
        ({"size": 100}, "size a thread"),
        ({"threads": 3}, "threads must be at most the pool's 2, got 3"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
    ],
)
def test_a_measurement_is_refused_with_a_reason(arguments: dict[str, int], message: str, two_threads: None) -> None:
    with pytest.raises(ValueError, match=message):
        native.ReadProbe(4 * MIB).measure(**arguments)


def test_sizes_that_are_too_small_or_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="size must be at least 1 byte"):
        native.ReadProbe(0)
    with pytest.raises(MemoryError):
        native.ReadProbe((1 << 64) - 1)
