"""Dense weights that stay quantised: logits compared with those of decoded weights, memory, and warnings."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import feed, make_model, make_planner_for

from ktqueue.loading.load import load_model
from ktqueue.loading.model_report import report_model
from ktqueue.operators import native
from ktqueue.operators.gpu import dense as dense_module
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.dense import DecodeBuffer, DecodedLinear, DenseWeights, QuantisedLinear, TwiceHeldLinear
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.packed import Bytes, PackedMatrix

from .kernels.matrices import activations, make_panels
from .test_demo import greedy


def logits(decoder: GpuDecoder) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([*feed(decoder, device=decoder.device, planner=make_planner_for).values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe with dense layers", "llama"])
def test_logits_equal_those_of_decoded_weights(
    family: str, dtype: torch.dtype, make_decoder: Callable[..., Any]
) -> None:
    """Models have shared experts, dense layers, biases and tied embeddings. Steps have few or many rows."""
    model = make_model(family).to(dtype)
    expected, *found = (
        logits(make_decoder(model, "Q8_0", dense=dense)) for dense in ("dequantised", "quantised", "both")
    )
    assert expected.std() > 0.1
    bound = 1e-5 if dtype == torch.float32 else 0.03
    assert all((logits - expected).norm() <= bound * expected.norm() for logits in found)


@pytest.mark.parametrize("few", [0, 4])
@pytest.mark.parametrize("tokens", [0, 1, 4, 20])
def test_products_are_equal_for_any_number_of_rows(
    tokens: int, few: int, device: str, random_weights: Callable[..., Bytes]
) -> None:
    """The matrix has parts of two formats and a bias. The buffer is smaller than it, and ends within a part."""
    parts = [make_panels(random_weights, quant, rows, 256, device) for quant, rows in (("Q4_K", 40), ("Q6_K", 13))]
    x = activations(tokens, 256, torch.bfloat16).to(device)
    bias = activations(1, 53, torch.bfloat16)[0].to(device)
    buffer = DecodeBuffer(torch.bfloat16, device, weights_per_piece=21 * 256)
    assert buffer.reserve(53, 256) == 21 * 256 * 2
    assert buffer.reserve(3, 256) == 0
    weights = torch.cat([part for _, part in parts])
    expected = x.cpu().float() @ weights.T
    panels = [part for part, _ in parts]
    found = QuantisedLinear(panels, bias, buffer, few_rows=few)(x).cpu()
    assert found.dtype == torch.bfloat16 and found.shape == (tokens, 53)
    torch.testing.assert_close(found.float(), expected + bias.cpu().float(), rtol=0.01, atol=0.05)
    sums = QuantisedLinear(panels, None, buffer, few_rows=few)(x, dtype=torch.float32).cpu()
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, expected, rtol=0.01, atol=0.05)


@pytest.mark.parametrize(
    ("tokens", "dtype", "few"), [(4, torch.bfloat16, True), (5, torch.bfloat16, False), (1, torch.float32, False)]
)
def test_few_rows_of_16_bits_are_multiplied_directly(
    tokens: int,
    dtype: torch.dtype,
    few: bool,
    device: str,
    random_weights: Callable[..., Bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []
    monkeypatch.setattr(dense_module, "multiply_few", lambda *arguments, **_: taken.append(arguments))
    panels, _ = make_panels(random_weights, "Q4_0", 16, 32, device)
    buffer = DecodeBuffer(dtype, device)
    buffer.reserve(16, 32)
    quantised = QuantisedLinear([panels], None, buffer)
    decoded = DecodedLinear(torch.zeros(16, 32, dtype=dtype, device=device), None)
    for linear in (quantised, TwiceHeldLinear(quantised, decoded)):
        taken.clear()
        out = linear(activations(tokens, 32, dtype).to(device))
        assert bool(taken) == few
    assert few or not out.any(), "the decoded weights are multiplied"


def test_weights_of_few_rows_are_not_rounded(device: str, random_weights: Callable[..., Bytes]) -> None:
    panels, weights = make_panels(random_weights, "Q6_K", 64, 512, device)
    x = activations(3, 512, torch.bfloat16)
    linear = QuantisedLinear([panels], None, DecodeBuffer(torch.bfloat16, device))
    found = linear(x.to(device), dtype=torch.float32).cpu()
    torch.testing.assert_close(found, x.float() @ weights.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dense", ["dequantised", "quantised", "both"])
def test_greedy_tokens_of_the_demo_model_and_its_bytes(dense: str, device: str, tmp_path: Path) -> None:
    """The tokens are those of CpuDecoder. The bytes are those of `inspect`, plus the buffer for decoded weights."""
    expected = greedy(load_model("demo", rules="rules/exact.yaml").module, "cpu")
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- match: {class: 'ForCausalLM$'}\n"
        f"  replace: {{op: GpuDecoder, activations: float32, dense: {dense}, device: {device}}}\n"
    )
    model = load_model("demo", rules=str(rules), device=device).module
    assert isinstance(model, GpuDecoder)
    held = sum(model.device_bytes().values())
    model.prepare_device(GpuSettings(max_tokens=128, expert_streaming="off"))
    found = greedy(model, device, make_planner_for)
    model.close()
    assert found == expected
    buffer = 4 * 8192 * 256 if dense == "quantised" else 0
    assert held == sum(report_model("demo", rules=str(rules), device=device).device_bytes.values()) + buffer


def test_weights_that_are_held_twice_take_the_memory_that_inspect_says(tmp_path: Path) -> None:
    held = {}
    for dense in ("dequantised", "both"):
        rules = tmp_path / f"{dense}.yaml"
        rules.write_text(f"- match: {{class: 'ForCausalLM$'}}\n  replace: {{op: GpuDecoder, dense: {dense}}}\n")
        model = load_model("demo", rules=str(rules), dtype=torch.bfloat16).module
        assert isinstance(model, GpuDecoder)
        held[dense] = sum(model.device_bytes().values())
        model.close()
        report = report_model("demo", rules=str(rules), dtype=torch.bfloat16)
        assert held[dense] == sum(report.device_bytes.values())
    assert held["both"] > 1.1 * held["dequantised"]


def test_quantised_weights_take_less_memory(make_decoder: Callable[..., Any]) -> None:
    model = make_model("qwen3_moe")
    held = [make_decoder(model, "Q8_0", dense=dense).device_bytes() for dense in ("dequantised", "quantised")]
    assert sum(held[1].values()) < sum(held[0].values()) - 150_000


def test_float_formats_are_decoded_with_one_warning(
    make_decoder: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("qwen3_moe")
    with caplog.at_level(logging.WARNING):
        found, expected = (make_decoder(model, "F16", dense=dense) for dense in ("quantised", "dequantised"))
    assert [record.message for record in caplog.records] == [
        "dense matrices in F16 are decoded: only quantised formats can be kept"
    ]
    assert torch.equal(logits(found), logits(expected))
    assert found.device_bytes() == expected.device_bytes()


def test_a_product_with_a_matrix_of_floats_is_decoded(given_weights: Callable[..., Any], device: str) -> None:
    weights = given_weights(make_model("qwen3"), "Q8_0")
    matrix, mixed = weights.matrix, "model.layers.0.self_attn.v_proj.weight"

    def with_floats(name: str) -> PackedMatrix:
        found: PackedMatrix = matrix(name)
        if name != mixed:
            return found
        decoded = native.dequantize(found.quant, found.data, found.rows * found.columns)
        return PackedMatrix("F32", found.rows, found.columns, decoded.view("u1"))

    weights.matrix = with_floats
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    x = activations(3, weights.matrix(mixed).columns).to(device)
    dense = DenseWeights(weights, torch.float32, device, "quantised")
    assert isinstance(dense.linear(*names[:2]), QuantisedLinear)
    assert not isinstance(dense.linear(*names), QuantisedLinear)
    products = [dense.linear(name)(x) for name in names]
    torch.testing.assert_close(dense.linear(*names)(x), torch.cat(products, dim=1))


def test_inspect_reports_the_packed_size_of_embeddings(tmp_path: Path) -> None:
    """Their size in the file is different."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, dense: quantised}\n")
    report = report_model("synthetic:qwen3-30b-a3b:q4_k_m:2", rules=str(rules), device="cuda", dtype=torch.bfloat16)
    (embedding,) = [row for row in report.rows if row.name == "model.embed_tokens"]
    assert embedding.device_bytes == native.packed_bytes("Q4_K", 151936, 2048) != embedding.file_bytes


def test_matrices_of_one_format_are_one_part(given_weights: Callable[..., Any], device: str) -> None:
    dense = DenseWeights(given_weights(make_model("qwen3_moe"), "Q8_0"), torch.float32, device, "quantised")
    linear = dense.linear(*(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"))
    assert isinstance(linear, QuantisedLinear)
    (part,) = linear.parts
    assert part.rows == 256


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="GpuDecoder: dense must be one of dequantised, quantised, both, got 'int4'"):
        GpuDecoder.from_module(make_model("qwen3"), dense="int4")
    with pytest.raises(ValueError, match="it has: activations, isa, dense"):
        GpuDecoder.from_module(make_model("qwen3"), densities=1)
