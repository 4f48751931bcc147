"""The expert layer against float64 arithmetic on the decoded weights, and its promises."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from expert_twin import PLAIN, TWIN_BOUND, Known, assert_close, tiled
from kernel_types import Exact, MakeWeights, RunLayer

from ktqueue.operators import native, reference
from ktqueue.operators.packed import Bytes, ExpertWeights, PackedExperts


def route(tokens: int, experts: int, slots: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(slots).indices
    return ids, torch.rand(tokens, slots, generator=generator)


def activations(tokens: int, hidden: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def known() -> Known:
    """Results of the twin in the next two tests, which are the same for each instruction set."""
    return {}


@pytest.mark.parametrize("kept", ["int8", "float32"])
@pytest.mark.parametrize("quant", native.QUANTS)
def test_the_layer_equals_float64(
    quant: str,
    kept: native.ActivationType,
    isa: str,
    make_weights: MakeWeights,
    run_layer: RunLayer,
    exact: Exact,
    known: Known,
    two_threads: None,
) -> None:
    packed = make_weights(quant, 5, 512, 256)
    layer = native.ExpertLayer(packed, activations=kept, isa=isa)
    for tokens in (1, 3, 8, 24) if isa == "scalar" else (1, 2, 3, 4, 7, 8, 16, 24, 128):  # the scalar kernel is slow
        x, (ids, weights) = activations(tokens, 512, tokens), route(tokens, 5, 3, tokens)
        assert_close(run_layer(layer, x, ids, weights), x, ids, weights, packed, exact, isa, kept, known)


@pytest.mark.parametrize("quant", native.QUANTS)
def test_many_tokens_equal_float64(
    quant: str,
    isa: str,
    make_weights: MakeWeights,
    run_layer: RunLayer,
    exact: Exact,
    known: Known,
    two_threads: None,
) -> None:
    packed = make_weights(quant, 3, 256, 256)
    tokens = 512 if isa != "scalar" else 128  # an expert's rows are at least 85, and 64 are computed at once
    x, (ids, weights) = activations(tokens, 256), route(tokens, 3, 2)
    got = run_layer(native.ExpertLayer(packed, isa=isa), x, ids, weights)
    assert_close(got, x, ids, weights, packed, exact, isa, known=known)


@pytest.mark.parametrize("tokens", [9, 40])
@pytest.mark.parametrize("quant", native.QUANTS)
def test_instruction_sets_agree(quant: str, tokens: int, make_weights: MakeWeights, run_layer: RunLayer) -> None:
    """Vector kernels agree bit for bit. The portable kernel agrees up to rounding: its exp is the C library's."""
    packed = make_weights(quant, 4, 256, 512)
    x, (ids, weights) = activations(tokens, 256), route(tokens, 4, 2)
    isas = [isa for isa in native.isas() if not tiled(packed, isa, ids)]
    first, *others = (run_layer(native.ExpertLayer(packed, isa=isa), x, ids, weights) for isa in isas)
    for other in others:
        assert torch.equal(other, others[0])
        assert (other - first).norm() <= TWIN_BOUND * first.norm()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_clamped", "silu_limited"])
def test_each_activation_equals_float64_with_and_without_biases(
    activation: native.ActivationName,
    biased: bool,
    isa: str,
    make_weights: MakeWeights,
    run_layer: RunLayer,
    exact: Exact,
) -> None:
    packed = make_weights("Q8_0", 4, 96, 64, biased=biased)
    x, (ids, weights) = activations(7, 96), route(7, 4, 2)
    options: dict[str, Any] = {"activation": activation, "alpha": 1.702, "limit": 0.5}
    layer = native.ExpertLayer(packed, native.GateFacts(**options), activations="float32", isa=isa)
    assert_close(run_layer(layer, x, ids, weights), x, ids, weights, packed, exact, isa, "float32", **options)


@pytest.mark.parametrize(("hidden", "intermediate"), [(45, 33), (1, 1), (64, 7), (31, 96)])
@pytest.mark.parametrize("quant", PLAIN)
def test_odd_sizes_equal_float64(
    quant: str, hidden: int, intermediate: int, isa: str, make_weights: MakeWeights, run_layer: RunLayer, exact: Exact
) -> None:
    packed = make_weights(quant, 3, hidden, intermediate)
    x, (ids, weights) = activations(9, hidden), route(9, 3, 2)
    layer = native.ExpertLayer(packed, isa=isa)
    run_layer(native.ExpertLayer(make_weights("F32", 3, 200, 100), isa=isa), activations(9, 200) / 0, ids, weights)
    got = run_layer(layer, x, ids, weights)  # the workspace still holds the other layer's NaN
    assert_close(got, x, ids, weights, packed, exact, isa)


def test_formats_may_differ_between_the_three(
    isa: str, make_weights: MakeWeights, run_layer: RunLayer, exact: Exact
) -> None:
    packed = make_weights(("Q4_K", "Q8_0", "Q6_K"), 4, 256, 256)
    x, (ids, weights) = activations(5, 256), route(5, 4, 2)
    assert_close(run_layer(native.ExpertLayer(packed, isa=isa), x, ids, weights), x, ids, weights, packed, exact, isa)


@pytest.mark.parametrize("quant", native.QUANTS)
def test_tiles_give_each_row_the_same_bits(
    quant: str, isa: str, make_weights: MakeWeights, run_layer: RunLayer, exact: Exact
) -> None:
    """Bits are the same in another order, among more rows, with 1, 2 and 3 threads. The error is below that of int8."""
    packed = make_weights(quant, 3, 256, 512)
    if not native.tile_rows(quant, isa):
        pytest.skip("this format has no tiles here")
    layer = native.ExpertLayer(packed, isa=isa)
    x, (ids, weights) = activations(601, 256), route(601, 3, 2)
    native.set_threads(1)
    together = run_layer(layer, x, ids, weights)
    expected = reference.experts(x.double(), ids, weights.double(), packed, exact)
    assert (together - expected).norm() <= 0.006 * expected.norm()
    order = torch.randperm(601, generator=torch.Generator().manual_seed(1))
    for threads in (1, 2, 3):
        native.set_threads(threads, torch_threads=1)
        assert torch.equal(run_layer(layer, x[order], ids[order], weights[order]), together[order])
        assert torch.equal(run_layer(layer, x[:333], ids[:333], weights[:333]), together[:333])
    native.set_threads(1)


def test_many_rows_equal_float64(
    isa: str, make_weights: MakeWeights, run_layer: RunLayer, exact: Exact, two_threads: None
) -> None:
    """There are more panels than one task takes, and the last task is not full."""
    packed = make_weights("Q4_0", 2, 96, 416)
    x, (ids, weights) = activations(40, 96), route(40, 2, 2)
    assert_close(run_layer(native.ExpertLayer(packed, isa=isa), x, ids, weights), x, ids, weights, packed, exact, isa)


@pytest.mark.parametrize("chosen", [[[3, 3], [3, 3], [3, 3]], [[0, 0], [1, 0], [0, 1]], [[5, 1], [1, 5], [5, 5]]])
def test_repeated_and_empty_experts_equal_float64(
    chosen: list[list[int]], isa: str, make_weights: MakeWeights, run_layer: RunLayer, exact: Exact
) -> None:
    packed = make_weights("Q8_0", 6, 64, 32)
    x, ids, weights = activations(3, 64), torch.tensor(chosen), torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.1, 0.9]])
    assert_close(run_layer(native.ExpertLayer(packed, isa=isa), x, ids, weights), x, ids, weights, packed, exact, isa)


def test_all_tokens_may_use_one_expert(
    isa: str, make_weights: MakeWeights, run_layer: RunLayer, exact: Exact, two_threads: None
) -> None:
    packed = make_weights("Q5_K", 8, 256, 256)
    x, ids, weights = activations(70, 256), torch.full((70, 1), 6), torch.ones(70, 1)
    assert_close(run_layer(native.ExpertLayer(packed, isa=isa), x, ids, weights), x, ids, weights, packed, exact, isa)


def test_zero_weights_and_no_slots_give_zeros_and_no_tokens_give_no_rows(
    isa: str, make_weights: MakeWeights, run_layer: RunLayer
) -> None:
    layer = native.ExpertLayer(make_weights("Q4_0", 4, 64, 32), isa=isa)
    ids, weights = route(3, 4, 2)
    assert run_layer(layer, activations(3, 64), ids, weights * 0).eq(0).all()
    assert run_layer(layer, activations(3, 64), ids[:, :0], weights[:, :0]).eq(0).all()
    assert run_layer(layer, activations(0, 64), ids[:0], weights[:0]).shape == (0, 64)


@pytest.mark.parametrize("quant", native.QUANTS)
def test_tokens_do_not_depend_on_each_other(
    quant: str, isa: str, make_weights: MakeWeights, run_layer: RunLayer
) -> None:
    """Bits are the same alone, among others, in another order, and with 1, 2 and 3 threads. AMX tiles are excluded."""
    packed = make_weights(quant, 5, 256, 512)
    rows = 33 if isa != "scalar" else 17
    x, (ids, weights) = activations(rows, 256), route(rows, 5, 3)
    if tiled(packed, isa, ids):
        pytest.skip("tiles: rounding depends on the number of rows")
    layer = native.ExpertLayer(packed, isa=isa)
    native.set_threads(1)
    together = run_layer(layer, x, ids, weights)
    for t in range(rows):
        assert torch.equal(run_layer(layer, x[t : t + 1], ids[t : t + 1], weights[t : t + 1])[0], together[t])
    for size in (2, 3, 5, 6, 13):
        assert torch.equal(run_layer(layer, x[:size], ids[:size], weights[:size]), together[:size])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for threads in (2, 3):
        native.set_threads(threads, torch_threads=1)
        assert torch.equal(run_layer(layer, x[order], ids[order], weights[order]), together[order])
    native.set_threads(1)


@pytest.mark.parametrize("nodes", [2, 3])
def test_slices_of_nodes_change_nothing(nodes: int, make_weights: MakeWeights, run_layer: RunLayer) -> None:
    """Weights are divided among pretended NUMA nodes, and their sizes are no multiples of the number of nodes."""
    packed = make_weights(("Q4_K", "Q8_0", "Q6_K"), 5, 256, 256)
    small = make_weights("F32", 3, 45, 20)
    cases = [(packed, 256, 5), (small, 45, 3)]
    native.set_threads(1)
    inputs = [(activations(9, hidden), *route(9, experts, 2)) for _, hidden, experts in cases]
    expected = [
        run_layer(native.ExpertLayer(weights), *call) for (weights, *_), call in zip(cases, inputs, strict=True)
    ]
    native.set_threads(4, torch_threads=1, pretend_nodes=nodes)
    layers = [native.ExpertLayer(weights) for weights, *_ in cases]
    for layer, call, wanted in zip(layers, inputs, expected, strict=True):
        assert torch.equal(run_layer(layer, *call), wanted)
    native.set_threads(1)
    for layer, call, wanted in zip(layers, inputs, expected, strict=True):
        assert torch.equal(run_layer(layer, *call), wanted)


def test_too_many_slots_are_refused(make_weights: MakeWeights, run_layer: RunLayer) -> None:
    layer = native.ExpertLayer(make_weights("F32", 70, 16, 16))
    x, (ids, weights) = activations(2, 16), route(2, 70, 65)
    with pytest.raises(ValueError, match="a token has at most 64 experts, got 65"):
        run_layer(layer, x, ids, weights)


@pytest.mark.parametrize("without", [0, 7 / 8])
def test_more_tokens_than_a_pass_takes_equal_each_token_alone(
    without: float, isa: str, make_weights: MakeWeights, run_layer: RunLayer
) -> None:
    """A pass takes more tokens if many of them have no expert here."""
    packed = make_weights("Q4_0", 3, 32, 32)
    count = 8500 if without else 2100
    x, (ids, weights) = activations(count, 32), route(count, 3, 2)
    ids[torch.arange(count) % 8 < 8 * without] = -1
    if tiled(packed, isa, ids):
        packed = make_weights("F16", 3, 32, 32)
    layer = native.ExpertLayer(packed, isa=isa)
    together = run_layer(layer, x, ids, weights)
    for t in (0, 7, 2046, 2047, 2048, 2055, 8184, 8191, 8192, 8199, count - 1):
        if t >= count:
            continue
        assert torch.equal(run_layer(layer, x[t : t + 1], ids[t : t + 1], weights[t : t + 1])[0], together[t])


def test_a_nan_stays_with_its_token(isa: str, make_weights: MakeWeights, run_layer: RunLayer) -> None:
    layer = native.ExpertLayer(make_weights("Q4_K", 4, 256, 256), isa=isa)
    x, (ids, weights) = activations(12, 256), route(12, 4, 2)
    clean = run_layer(layer, x, ids, weights)
    x[3, 7], x[5, 0], weights[8, 1] = torch.nan, torch.inf, torch.nan
    dirty = run_layer(layer, x, ids, weights)
    bad = [3, 5, 8]
    good = [t for t in range(12) if t not in bad]
    assert torch.equal(dirty[good], clean[good])
    assert not dirty[bad].isfinite().any()


def test_large_gates_do_not_overflow(isa: str, make_weights: MakeWeights, run_layer: RunLayer, exact: Exact) -> None:
    """With gates of +-300 and +-1000, exp must neither overflow to NaN nor lose the sign."""
    packed = make_weights("F32", 1, 32, 32)
    x, ids, weights = activations(4, 32) * 1000, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    assert_close(run_layer(native.ExpertLayer(packed, isa=isa), x, ids, weights), x, ids, weights, packed, exact, isa)


def test_weights_are_packed_from_any_alignment_and_not_kept(
    isa: str, make_weights: MakeWeights, run_layer: RunLayer
) -> None:
    packed = make_weights("Q6_K", 3, 256, 256)
    x, (ids, weights) = activations(5, 256), route(5, 3, 2)
    expected = run_layer(native.ExpertLayer(packed, isa=isa), x, ids, weights)

    def shifted(part: PackedExperts) -> PackedExperts:
        file = np.concatenate([np.zeros(1, np.uint8), *part.data])
        size = part.data[0].size
        file.flags.writeable = False
        views = [file[1 + i * size : 1 + (i + 1) * size] for i in range(len(part.data))]
        return PackedExperts(part.quant, part.rows, part.columns, views)

    moved = ExpertWeights(shifted(packed.gate), shifted(packed.up), shifted(packed.down))
    layer = native.ExpertLayer(moved, isa=isa)
    del moved
    gc.collect()
    noise = [
        np.full(sum(data.nbytes for data in packed.gate.data), 255, np.uint8) for _ in range(8)
    ]  # overwrites freed memory
    assert torch.equal(run_layer(layer, x, ids, weights), expected)
    assert noise


class Copies(Sequence[Bytes]):
    """Arrays that are copied on access, so that nobody else keeps them."""

    def __init__(self, arrays: Sequence[Bytes]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: Any) -> Any:
        return self.arrays[index].copy()


def test_weights_may_be_created_on_access(make_weights: MakeWeights, run_layer: RunLayer) -> None:
    packed = make_weights("Q4_0", 3, 64, 64)
    fleeting = ExpertWeights(
        *(replace(matrix, data=Copies(matrix.data)) for matrix in (packed.gate, packed.up, packed.down))
    )
    x, (ids, weights) = activations(4, 64), route(4, 3, 2)
    expected = run_layer(native.ExpertLayer(packed), x, ids, weights)
    assert torch.equal(run_layer(native.ExpertLayer(fleeting), x, ids, weights), expected)


@pytest.mark.parametrize("bad", [-2, 4, 2**40, -(2**63)])
def test_expert_ids_out_of_range_are_refused(bad: int, make_weights: MakeWeights) -> None:
    layer = native.ExpertLayer(make_weights("Q4_0", 4, 64, 32))
    x, (ids, weights) = activations(3, 64), route(3, 4, 2)
    ids[2, 1] = bad
    out = np.full((3, 64), 7.0, np.float32)
    with pytest.raises(ValueError, match=rf"expert id must be from 0 to 3 or -1 for none, got {bad} for token 2"):
        layer.forward(x.numpy(), ids.numpy(), weights.numpy(), out)
    assert (out == 7.0).all()


def test_arrays_that_do_not_fit_are_refused(make_weights: MakeWeights) -> None:
    layer = native.ExpertLayer(make_weights("Q4_0", 4, 64, 32))
    x, (ids, weights) = activations(3, 64).numpy(), (array.numpy() for array in route(3, 4, 2))
    out = np.empty_like(x)
    for arguments, message in [
        ((x[:, :32].copy(), ids, weights, out), r"hidden_states must have shape \[any, 64\], got \[3, 32\]"),
        ((x.astype(np.float64), ids, weights, out), "hidden_states has the wrong element type"),
        ((np.asfortranarray(x), ids, weights, out), "hidden_states must be contiguous"),
        ((x, ids.astype(np.int32), weights, out), "top_k_index has the wrong element type"),
        ((x, ids[:2], weights, out), r"top_k_index must have shape \[3, any\], got \[2, 2\]"),
        ((x, ids, weights[:, :1].copy(), out), r"top_k_weights must have shape \[3, 2\], got \[3, 1\]"),
        ((x, ids, weights, out[:2]), r"out must have shape \[3, 64\], got \[2, 64\]"),
        ((x, ids[0], weights, out), r"top_k_index must have shape \[3, any\], got \[2\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer.forward(*arguments)


def test_weights_that_do_not_fit_are_refused(make_weights: MakeWeights) -> None:
    good = make_weights("Q4_0", 2, 64, 32)

    def gate(quant: str, rows: int, columns: int, data: Any) -> ExpertWeights:
        return ExpertWeights(PackedExperts(quant, rows, columns, data), good.up, good.down)

    for packed, message in [
        (gate("Q4_0", 32, 60, good.gate.data), "row length must be a positive multiple of 32 weights for Q4_0, got 60"),
        (
            gate("Q4_K", 32, 64, good.gate.data),
            "row length must be a positive multiple of 256 weights for Q4_K, got 64",
        ),
        (gate("Q4_0", 31, 64, good.gate.data), r"gate must have shape \[1116\], got \[1152\]"),
        (gate("Q4_0", 32, 64, good.gate.data[:1]), "up must be 1 matrices of 32 x 64, got 2 of 32 x 64"),
        (gate("Q4_0", 32, 64, []), "gate must have at least one expert"),
        (gate("Q1_0", 32, 64, good.gate.data), "quant must be one of"),
        (gate("Q4_0", -1, 64, good.gate.data), r"gate must be \(quant, rows, columns, arrays, bias\)"),
        (gate("Q4_0", 32, 64, [1, 2]), "gate must hold uint8 arrays"),
        (ExpertWeights(good.gate, good.up, good.gate), "down must be 2 matrices of 64 x 32, got 2 of 32 x 64"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.ExpertLayer(packed)


@pytest.mark.parametrize(("quant", "offset"), [("Q4_0", 18), ("Q4_K", 2), ("Q6_K", 208), ("F32", 4), ("MXFP4", 17)])
def test_scales_that_are_not_finite_are_refused(quant: str, offset: int, make_weights: MakeWeights) -> None:
    """The second row (or block) has an infinite d, so its products are never finite."""
    packed = make_weights(quant, 2, 256, 256)
    row = packed.up.data[1].reshape(256, -1)[1]
    if quant in ("F32", "MXFP4"):
        row[offset : offset + 4] = 0xFF
    else:
        row[offset : offset + 2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    with pytest.raises(ValueError, match="up of expert 1: row 1 has a scale or weight that is not finite"):
        native.ExpertLayer(packed)
