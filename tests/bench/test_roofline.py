"""The roofline: limits, routing, and the loop that measures, on a machine with known limits."""

import numpy as np
import pytest

from ktqueue.bench.experts import Load, Sweep, arithmetic_of, best_seconds, sweep_memory
from ktqueue.bench.random_layers import expert_bytes, same_experts, uniform
from ktqueue.bench.roofline import Bound, LayerShape, LayerWork, Limits, layer_work
from ktqueue.operators import native

QWEN = LayerShape(hidden=2048, intermediate=768, experts=128, experts_per_token=8)
MIB = 1 << 20


def test_the_longer_of_reading_and_computing_binds() -> None:
    limits = Limits(bandwidth=100.0, peak=1000.0)
    assert limits.seconds(LayerWork(500, 2000)) == 5.0
    assert limits.bound(LayerWork(500, 2000)) is Bound.MEMORY
    assert limits.seconds(LayerWork(500, 9000)) == 9.0
    assert limits.bound(LayerWork(500, 9000)) is Bound.ARITHMETIC


def test_the_work_of_a_layer_call_is_counted() -> None:
    """Of Q4_K: 256 weights in 144 bytes. A multiply-add for each weight and (token, expert) pair is two operations."""
    expert_size = expert_bytes("Q4_K", QWEN)
    assert expert_size == 3 * 2048 * 768 * 144 // 256
    work = layer_work(QWEN, expert_size, touched=8, pairs=16)
    assert work == LayerWork(8 * expert_size, 2 * 16 * 3 * 2048 * 768)


def test_expert_bytes_refuses_rows_of_half_a_block() -> None:
    with pytest.raises(ValueError, match="Q4_K"):
        expert_bytes("Q4_K", LayerShape(hidden=128, intermediate=256, experts=1, experts_per_token=1))


def test_the_same_experts_come_again_only_after_all_others() -> None:
    pattern = same_experts(3, 8)
    assert (pattern.choices.shape, pattern.touched, pattern.pairs) == ((3, 8), 8, 24)
    calls = pattern.calls(32)
    assert len(calls) == 4
    assert sorted(np.concatenate([np.unique(call) for call in calls])) == list(range(32))


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_random_routing_touches_an_expert_again_only_after_all_others(tokens: int) -> None:
    experts = 24
    pattern = uniform(tokens, experts, 4, np.random.default_rng(1))
    assert pattern.choices.shape == (tokens, 4)
    assert all(len(set(row)) == 4 for row in pattern.choices)
    assert sorted(set(pattern.choices.reshape(-1))) == list(range(pattern.touched))
    order: list[int] = []
    for call in pattern.calls(experts):
        expert_of = dict(zip(pattern.choices.reshape(-1).tolist(), call.reshape(-1).tolist(), strict=True))
        order += [expert_of[number] for number in range(pattern.touched)]
    assert order == [i % experts for i in range(len(order))]
    assert len(order) % experts == 0  # the last call ends where the first began


def test_uniform_routing_is_uniform() -> None:
    """8 of 128 experts for 16 tokens: 128 (1 - (120/128)^16) = 82.4 distinct ones are expected."""
    touched = [uniform(16, 128, 8, np.random.default_rng(seed)).touched for seed in range(8)]
    assert 80 < np.mean(touched) < 85


def test_formats_are_compared_with_the_arithmetic_that_their_kernels_use() -> None:
    offered = {"scalar": "int8 fp32", "avx2": "int8 fp32", "avxvnni": "int8", "avx512": "int8 bf16 fp32"}
    offered["amx"] = "int8 bf16"
    peaks = [(isa, kind, "") for isa, kinds in offered.items() for kind in kinds.split()]
    tiles = {("Q4_K", "amx"): 32, ("BF16", "amx"): 8}

    def arithmetic(quant: str, isa: str, rows: int) -> tuple[str, str]:
        return arithmetic_of(quant, isa, rows, tile_rows=lambda *key: tiles.get(key, 0), peaks=lambda: peaks)

    assert arithmetic("Q4_K", "avx512", 64) == ("avx512", "int8")
    assert arithmetic("BF16", "avx2", 64) == ("avx2", "fp32")
    assert arithmetic("Q4_K", "avxvnni", 1) == ("avxvnni", "int8")
    assert arithmetic("F16", "avxvnni", 1) == ("avx2", "fp32")  # it has no fp32 of its own
    assert arithmetic("Q4_K", "amx", 31) == ("avx512", "int8")
    assert arithmetic("Q4_K", "amx", 32) == ("amx", "bf16")
    assert arithmetic("BF16", "amx", 8) == ("amx", "bf16")
    assert arithmetic("F16", "amx", 512) == ("avx512", "fp32")


@pytest.mark.parametrize(("invariant", "rows"), [(False, (8, 8, 24, 0)), (True, (1, 1, 0, 0))])
def test_batch_invariance_decides_on_tiles(
    invariant: bool, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    thresholds = {"BF16": 8, "FP8": 8, "Q6_K": 24, "F32": 0}
    monkeypatch.setattr(native, "tile_rows", lambda quant, _isa: thresholds[quant])
    sweep = Sweep(shape=QWEN, quants=(), isas=(), loads=(), seconds=0.0, batch_invariant=invariant)
    assert tuple(sweep.tile_rows(quant, "amx") for quant in thresholds) == rows


def test_calls_are_taken_in_turn() -> None:
    taken: list[int] = []
    calls = [lambda i=i: taken.append(i) for i in range(3)]
    assert best_seconds(calls, 0.0, lambda: taken.append(9)) > 0
    assert taken[1] == taken[-1] == 9  # probes after the call to warm up, and at the end
    assert taken.count(9) == 2
    turns = [call for call in taken if call != 9]
    assert len(turns) > 3
    assert turns == [i % 3 for i in range(len(turns))]


@pytest.mark.parametrize(("routed", "experts"), [(False, 104), (True, 128)])
def test_weights_exceed_the_last_cache_four_times(routed: bool, experts: int) -> None:
    """A Q4_K expert has 2.53 MiB, so 13 groups of 8 exceed 256 MiB. Routed tokens need all 128. Q2_K takes two layers.

    While the last layer is packed, what it is packed from is there too.
    """
    loads = (Load(1), Load(1, routed=True)) if routed else (Load(1),)
    for quant, count, layers in (("Q4_K", experts, 1), ("Q2_K", 128, 2)):
        sweep = Sweep(shape=QWEN, quants=(quant,), isas=("scalar",), loads=loads, seconds=0.0)
        assert sweep_memory(sweep, {"L1": MIB, "L3": 64 * MIB}) == (layers + 1) * count * expert_bytes(quant, QWEN)
