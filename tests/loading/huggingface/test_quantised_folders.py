"""Quantised folders: weights are those of the layouts' own programs, tokens those of float32, damage is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_files import write_folder
from quantised_matrices import QUARK_MXFP4, SCHEMES, Scheme, Tensors, compressed, words
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.convert import convert
from ktqueue.loading.huggingface import quantised_blocks
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.huggingface.quantised_blocks import reciprocal
from ktqueue.loading.load import LoadedModel, load_model, open_checkpoint
from ktqueue.loading.model_report import report_model
from ktqueue.loading.rules import SHIPPED_RULES
from ktqueue.operators import native
from ktqueue.operators.kv_cache import CacheScale

EXACT = str(SHIPPED_RULES / "exact.yaml")
EXPERTS = "model.layers.0.mlp.experts"
DOWN = f"{EXPERTS}.3.down_proj"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}


def quantised(source: Path, scheme: Scheme) -> tuple[Tensors, Tensors]:
    """Return the tensors of a folder with all linear layers but routers and the head made new, and their values."""
    plain = safetensors.torch.load_file(source / "model.safetensors")
    noise = torch.Generator().manual_seed(11)
    tensors: Tensors = {}
    for name, tensor in plain.items():
        module, _, part = name.rpartition(".")
        if module.endswith("_proj") and part == "weight":
            parts, values = scheme.make(len(tensor), tensor.shape[1], noise)
            tensors |= {f"{module}.{key}": value.contiguous() for key, value in parts.items()}
            plain[name] = values
        else:
            tensors[name] = tensor
    return tensors, plain


@pytest.fixture
def source(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen3_moe", **SIZES)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_folder_has_the_weights_and_the_tokens_of_its_float32(
    name: str, source: Path, tmp_path: Path, assert_equals_transformers: Callable[[LoadedModel, Path], None]
) -> None:
    scheme = SCHEMES[name]
    tensors, plain = quantised(source, scheme)
    folder = write_folder(tmp_path / "packed", source, tensors, scheme.config)
    checkpoint = open_folder(folder)
    gates = [torch.cat([plain[f"{EXPERTS}.{i}.{p}_proj.weight"] for p in ("gate", "up")]) for i in range(8)]
    downs = [plain[f"{EXPERTS}.{i}.down_proj.weight"] for i in range(8)]
    for fused, matrices in (("gate_up_proj", gates), ("down_proj", downs)):
        assert checkpoint.quant(f"{EXPERTS}.{fused}") == scheme.quant
        assert torch.equal(checkpoint.decode(f"{EXPERTS}.{fused}", torch.float32), torch.stack(matrices))
    kept = checkpoint.experts(EXPERTS)
    assert (kept.gate.quant, kept.up.quant, kept.down.quant) == (scheme.quant,) * 3
    for dense in ("self_attn.k_proj.weight", "mlp.gate.weight"):
        stored = f"model.layers.1.{dense}"
        assert torch.equal(checkpoint.decode(stored, torch.float32), plain[stored])
    # One of each way to read.
    if name in ("fp8 blocks", "compressed fp8", "compressed int4 zeros", "gptq", "awq", "modelopt nvfp4"):
        reference = write_folder(tmp_path / "plain", source, {key: value.contiguous() for key, value in plain.items()})
        assert_equals_transformers(load_model(str(folder), rules=EXACT), reference)


@pytest.mark.parametrize(
    "name", ["fp8 blocks", "compressed int4 zeros", "gptq zeros", "awq", "compressed nvfp4", "compressed mxfp4"]
)
def test_a_large_matrix_is_converted_in_parts(
    name: str, make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_model("qwen3_moe", **SIZES | {"head_dim": 80})  # 160 rows of k_proj are two parts and a half
    tensors, plain = quantised(source, SCHEMES[name])
    checkpoint = open_folder(write_folder(tmp_path / "packed", source, tensors, SCHEMES[name].config))
    monkeypatch.setattr(quantised_blocks, "PART", 1)
    native.set_threads(3, torch_threads=1)
    try:
        for large in (1, 1 << 20):
            monkeypatch.setattr(quantised_blocks, "LARGE", large)
            assert torch.equal(checkpoint.decode(K_PROJ, torch.float32), plain[K_PROJ])
    finally:
        native.set_threads(1)


def test_fp8_is_dequantised_as_transformers_does() -> None:
    parts, values = SCHEMES["fp8 blocks"].make(256, 384, torch.Generator().manual_seed(3))
    transformers_own = Fp8Dequantize(None)  # type: ignore[no-untyped-call]
    found = transformers_own._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)
    assert torch.equal(found, values)


@pytest.mark.parametrize("name", ["fp8 blocks", "modelopt nvfp4"])
def test_blocks_may_be_cut(name: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Rows of 96 columns are no whole blocks of ours: they are read as F32."""
    source = make_model("qwen3_moe", hidden_size=128, moe_intermediate_size=96, head_dim=32)
    tensors, plain = quantised(source, SCHEMES[name])
    checkpoint = open_folder(write_folder(tmp_path / "packed", source, tensors, SCHEMES[name].config))
    quants = (checkpoint.quant(f"{EXPERTS}.gate_up_proj"), checkpoint.quant(f"{EXPERTS}.down_proj"))
    assert quants == (SCHEMES[name].quant, "F32")
    downs = torch.stack([plain[f"{EXPERTS}.{i}.down_proj.weight"] for i in range(8)])
    assert torch.equal(checkpoint.decode(f"{EXPERTS}.down_proj", torch.float32), downs)


def test_a_quantised_folder_is_inspected_and_converted(source: Path, tmp_path: Path) -> None:
    tensors, plain = quantised(source, SCHEMES["compressed int4"])
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)
    tensors[f"{DOWN}.input_scale"] = torch.ones(1)
    folder = write_folder(tmp_path / "packed", source, tensors, SCHEMES["compressed int4"].config)
    report = report_model(str(folder))
    assert report.refusal is None and "Q4_0" in str(report)
    convert(folder, tmp_path / "model.gguf", experts="f32", dense="f32")
    converted = open_checkpoint(str(tmp_path / "model.gguf"))
    downs = torch.stack([plain[f"{EXPERTS}.{i}.down_proj.weight"] for i in range(8)])
    assert torch.equal(converted.decode(f"{EXPERTS}.down_proj", torch.float32), downs)
    assert torch.equal(converted.decode(K_PROJ, torch.float32), plain[K_PROJ])


@pytest.mark.parametrize(
    "names",
    [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")],
    ids=["compressed-tensors", "ModelOpt", "Quark"],
)
def test_a_folder_may_state_scales_of_a_float8_cache(names: tuple[str, str], source: Path, tmp_path: Path) -> None:
    """They are rounded up to powers of two. Of several for a layer, as for its heads, the largest counts."""
    tensors, _ = quantised(source, SCHEMES["compressed fp8"])
    for name, scale in zip(names, (torch.tensor(0.5), torch.tensor([3.0, 5.0])), strict=True):
        tensors[f"model.layers.1.self_attn.{name}"] = scale
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder}\n")
    folder = write_folder(tmp_path / "packed", source, tensors, SCHEMES["compressed fp8"].config)
    model = load_model(str(folder), rules=str(rules))
    model.module.close()  # type: ignore[operator]
    assert model.kv_layout(16).scales == ()
    scales = model.kv_layout(16, torch.float8_e4m3fn).scales
    assert scales[1] == CacheScale(0.5, 8.0) and scales[1] != scales[0]
    tensors[f"model.layers.1.self_attn.{names[0]}"] = torch.tensor([-1.0])
    with pytest.raises(CheckpointError, match=r"layers\.1.*must be a positive number"):
        open_folder(write_folder(tmp_path / "damaged", source, tensors, SCHEMES["compressed fp8"].config))


def test_modelopts_own_file_counts_if_the_config_says_nothing(source: Path, tmp_path: Path) -> None:
    tensors, plain = quantised(source, SCHEMES["modelopt nvfp4"])
    folder = write_folder(tmp_path / "packed", source, tensors)
    stated = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    report = report_model(str(folder))
    assert report.refusal is None and "FP4" in str(report)
    assert torch.equal(open_folder(folder).decode(K_PROJ, torch.float32), plain[K_PROJ])


def renamed(tensors: Tensors, **changes: torch.Tensor | None) -> None:
    for part, value in changes.items():
        tensors.pop(f"{DOWN}.{part}", None)
        if value is not None:
            tensors[f"{DOWN}.{part}"] = value


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fp8 blocks", {"weight_scale_inv": None}, "3.down_proj has no weight_scale_inv, but weight F8_E4M3"),
        ("fp8 blocks", {"weight": None}, "3.down_proj has no weight, but weight_scale_inv F32"),
        (
            "fp8 blocks",
            {"weight_scale_inv": torch.ones(2, 1)},
            r"3.down_proj.weight_scale_inv' is F32 \[2, 1\], expected one number .* block of \[128, 128\]",
        ),
        ("fp8 blocks", {"weight": torch.ones(128, 128)}, r"weight' is F32 \[128, 128\], expected a matrix in F8_E4M3"),
        ("fp8 blocks", {"weight_scale": torch.ones(1, 1)}, "weight_scale is of no known use beside weight"),
        ("fp8 blocks", {"weight_scale_inv": torch.ones(1, 1).int()}, r"is I32 \[1, 1\], expected in F32, F16 or BF16"),
        ("compressed int4", {"weight_shape": None}, "has no weight_shape, but weight_packed I32, weight_scale BF16"),
        ("compressed int4", {"weight_shape": torch.tensor([128, 96])}, r"weight_scale' is BF16 \[128, 4\], expected"),
        ("compressed int4", {"weight_shape": torch.ones(3)}, r"is F32 \[3\], expected two numbers in I64"),
        ("compressed int4", {"weight_packed": torch.ones(128, 12).int()}, "expected codes of 4 or 8 bits in I32"),
        ("compressed int4", {"weight_scale": torch.ones(128, 8)}, "expected scales of 128 rows and of groups of a mul"),
        ("compressed int4 zeros", {"weight_zero_point": torch.ones(128, 2).int()}, r"zero points of 4 bits .*16, 2\]"),
        ("gptq", {"qzeros": None}, "has no qzeros, but"),
        ("gptq", {"qweight": torch.ones(32, 128).int()}, r"scales' is F16 \[2, 128\], expected|differs in .* shape"),
        ("gptq", {"qzeros": torch.ones(2, 8).int()}, r"expected zero points of 4 bits in I32 \[2, 16\]"),
        ("compressed mxfp4", {"weight_scale": torch.ones(128, 4)}, r"F32 \[128, 4\], expected scales in U8 \[128, 4\]"),
        (
            "modelopt nvfp4",
            {"weight_scale": torch.ones(128, 8)},
            r"F32 \[128, 8\], expected scales in F8_E4M3 \[128, 8\]",
        ),
        ("modelopt nvfp4", {"weight_scale_2": torch.ones(2)}, r"F32 \[2\], expected one number in F32"),
        ("compressed nvfp4", {"weight_packed": torch.ones(128, 64)}, "expected codes of 4 bits in U8"),
        ("compressed nvfp4", {"weight_scale": None}, "has no weight_scale, but weight_"),
        ("awq", {"g_idx": torch.ones(128).int()}, "g_idx is of no known use beside qweight, qzeros, scales"),
        ("awq", {"qweight": torch.ones(128).int()}, r"is I32 \[128\], expected words in I32 \[columns, words\]"),
    ],
)
def test_damaged_parts_are_refused_by_name(
    name: str, changes: dict[str, torch.Tensor | None], message: str, source: Path, tmp_path: Path
) -> None:
    tensors, _ = quantised(source, SCHEMES[name])
    renamed(tensors, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_folder(write_folder(tmp_path / "damaged", source, tensors, SCHEMES[name].config))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"g_idx": torch.arange(128).int() % 2}, "g_idx.*columns sorted by activations, desc_act, are not"),
        ("gptq", {"qzeros": words(torch.full((2, 128), 6), 4)}, "has 7, expected zero points of 8, since .* sym"),
        (
            "compressed int4",
            {"weight_scale": torch.full((128, 4), 1e6)},
            "a scale is 1000000.0, which float16 does not hold",
        ),
        ("compressed int4", {"weight_scale": torch.full((128, 4), 0.0123)}, "a scale is 0.0122"),
        ("compressed int4", {"weight_g_idx": torch.zeros(128).int()}, "weight_g_idx.*desc_act"),
        ("fp8 blocks", {"weight": torch.full((128, 128), torch.nan).to(torch.float8_e4m3fn)}, "weight' has NaN"),
        (
            "compressed nvfp4",
            {"weight_scale": torch.full((128, 8), -1.0).to(torch.float8_e4m3fn)},
            "weight_scale' has NaN or a number below 0",
        ),
        ("compressed nvfp4", {"weight_global_scale": torch.zeros(1)}, r"is 0.0, expected a number from 2\^-60"),
        (
            "fp8 blocks",
            {"weight_scale_inv": torch.full((1, 1), torch.nan)},
            "weight_scale_inv' has numbers that are not",
        ),
        ("compressed mxfp4", {"weight_scale": torch.full((128, 4), 255).byte()}, "weight_scale' has NaN"),
    ],
    ids=[
        *("sorted", "other zeros", "large scale", "odd scale", "also sorted", "nan", "below 0", "zero", "nan scale"),
        "nan exponent",
    ],
)
def test_values_that_cannot_be_held_are_refused_when_they_are_read(
    name: str, changes: dict[str, torch.Tensor | None], message: str, source: Path, tmp_path: Path
) -> None:
    tensors, _ = quantised(source, SCHEMES[name])
    renamed(tensors, **changes)
    folder = write_folder(tmp_path / "damaged", source, tensors, SCHEMES[name].config)
    with pytest.raises(CheckpointError, match=f"3.down_proj.*{message}"):
        load_model(str(folder))


def test_zero_points_that_are_not_whole_words_are_refused(source: Path, tmp_path: Path) -> None:
    tensors, _ = quantised(source, SCHEMES["gptq zeros"])
    odd, _ = SCHEMES["gptq zeros"].make(132, 128, torch.Generator())
    renamed(tensors, **odd | {"qzeros": odd["qzeros"][:, :-1].contiguous()})  # 16 of 16.5 words
    with pytest.raises(
        CheckpointError, match=r"3.down_proj.qweight' has 132 rows, expected a multiple of 8 rows, since"
    ):
        open_folder(write_folder(tmp_path / "odd", source, tensors, SCHEMES["gptq zeros"].config))


@pytest.mark.parametrize("blocks", [(1, 1), (2, 1)])
def test_fused_experts_in_fp8_are_read_as_those_of_each_expert(
    blocks: tuple[int, int], source: Path, tmp_path: Path
) -> None:
    """Mistral 4's have one scale for each expert, others one for each block."""
    tensors, plain = quantised(source, SCHEMES["fp8 blocks"])
    noise = torch.Generator().manual_seed(3)
    for layer in (0, 1):
        experts = f"model.layers.{layer}.mlp.experts"
        for name in [name for name in tensors if name.startswith(experts)]:
            del tensors[name]
        for part, rows, scales in (("gate_up", 256, blocks), ("down", 128, (1, 1))):
            codes = (torch.randn(8, rows, 128, generator=noise) * 8).to(torch.float8_e4m3fn)
            factors = torch.rand(8, *scales, generator=noise) + 0.5
            tensors |= {f"{experts}.{part}_proj": codes, f"{experts}.{part}_proj_scale_inv": factors}
            tensors[f"{experts}.{part}_proj_activation_scale"] = torch.ones(())
            plain[f"{experts}.{part}_proj"] = codes.float() * factors.repeat_interleave(rows // scales[0], 1)
    checkpoint = open_folder(write_folder(tmp_path / "fused", source, tensors, SCHEMES["fp8 blocks"].config))
    for name in (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"):
        assert checkpoint.quant(name) == "FP8"
        assert torch.equal(checkpoint.decode(name, torch.float32), plain[name])


def test_quantised_experts_in_one_tensor_are_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Llama 4's in FP8, as ModelOpt writes them."""
    source = make_model("llama4_text")
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    stacked = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    for name in stacked:
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_weight_scale": torch.ones(())}
    folder = write_folder(tmp_path / "fp8", source, tensors, SCHEMES["modelopt fp8"].config)
    with pytest.raises(CheckpointError, match=r"_proj' is F8_E4M3 \[8, .*several experts in one tensor are not supp"):
        open_folder(folder)


def test_a_reciprocal_stands_for_a_division() -> None:
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()  # all but NaN
    numbers = np.random.default_rng(3).uniform(1, 1e6, 300)
    for divisor in np.array([2**-60, 1 / 3, 2688, 2**60, *numbers], np.float32):
        d, r = reciprocal(float(divisor))
        assert np.array_equal(np.array([d, r], np.float32), [d, r])
        products = (scales * (d + r)).astype(np.float32)
        np.testing.assert_array_equal(products, scales.astype(np.float32) / divisor)


def test_tiny_scales_are_rounded_as_float16_is(source: Path, tmp_path: Path) -> None:
    tensors, _ = quantised(source, SCHEMES["compressed int4"])
    renamed(tensors, weight_scale=torch.full((128, 4), 1e-12).bfloat16())
    checkpoint = open_folder(write_folder(tmp_path / "tiny", source, tensors, SCHEMES["compressed int4"].config))
    assert not checkpoint.decode(f"{EXPERTS}.down_proj", torch.float32)[3].any()


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ in 3 bits"),
        ({"quant_method": "gptq", "bits": 8, "sym": False}, "GPTQ in 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic bits"),
        ({"quant_method": "auto-round", "bits": 2}, "AutoRound in 2 bits"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "nv_fp"}, "data_type 'nv_fp'"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "llm_compressor"}, "packing_format 'llm_comp"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 8}}}, "8 bits in extra_config"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "awq", "bits": 8}, "AWQ in 8 bits"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
        *(
            ({"quant_method": "modelopt", "quant_algo": algo}, f"ModelOpt, quant_algo {algo!r}")
            for algo in ("NVFP4_AWQ", "MIXED_PRECISION", "FP8_PB_WO", None)
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": QUARK_MXFP4 | {"group_size": 16}}},
            "Quark, weights in fp4 with e8m0 scales of 16",
        ),
        (
            {"quant_method": "quark", "layer_quant_config": {"*down*": {"weight": {"dtype": "int4"}}}},
            "Quark, weights in int4 with None scales of None",
        ),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        (compressed("mxfp8-quantized", "float", 8), "format 'mxfp8-quantized' with float of 8 bits"),
        (compressed("pack-quantized", "int", 3), "format 'pack-quantized' with int of 3 bits"),
        (
            {**compressed("pack-quantized", "int", 4), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config 'sparse-24-bitmask'",
        ),
        ({**compressed("pack-quantized", "int", 4), "transform_config": {"a": 1}}, "transform_config"),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(
    config: dict[str, Any], method: str, source: Path, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "other", source, {"model.norm.weight": torch.ones(128)}, config)
    with pytest.raises(CheckpointError, match=f"quantised with .*{method}.*, which is not supported"):
        open_folder(folder)
