"""gpt-oss folders: experts in MXFP4 are those that transformers decodes, and damaged parts are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_files import write_folder
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.load import LoadedModel, load_model
from ktqueue.loading.rules import SHIPPED_RULES

EXACT = str(SHIPPED_RULES / "exact.yaml")
MODULE = "model.layers.0.mlp.experts"
Tensors = dict[str, torch.Tensor]


def quantization(method: str) -> dict[str, Any]:
    return {"quant_method": method, "modules_to_not_convert": ["lm_head"]}


@pytest.fixture
def quantised(make_model: Callable[..., Path]) -> tuple[Tensors, Tensors]:
    """A random gpt-oss with experts in MXFP4: its tensors as published, and as transformers decodes them."""
    packed = safetensors.torch.load_file(make_model("gpt_oss") / "model.safetensors")
    decoded = dict(packed)
    noise = torch.Generator().manual_seed(5)
    for name in [name for name in packed if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = packed.pop(name).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=noise)
        scales = torch.randint(120, 127, shape, dtype=torch.uint8, generator=noise)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        decoded[name] = values.contiguous()
    return packed, decoded


def test_experts_in_mxfp4_are_those_of_transformers(
    quantised: tuple[Tensors, Tensors],
    make_model: Callable[..., Path],
    tmp_path: Path,
    assert_equals_transformers: Callable[[LoadedModel, Path], None],
) -> None:
    packed, decoded = quantised
    folder = write_folder(tmp_path / "packed", make_model("gpt_oss"), packed, quantization("mxfp4"))
    checkpoint = open_folder(folder)
    assert (checkpoint.quant(f"{MODULE}.gate_up_proj"), checkpoint.quant(f"{MODULE}.down_proj")) == ("MXFP4", "MXFP4")
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        assert torch.equal(checkpoint.decode(f"{MODULE}.{name}", torch.float32), decoded[f"{MODULE}.{name}"])
    reference = write_folder(tmp_path / "decoded", make_model("gpt_oss"), decoded)
    model = load_model(str(folder), rules=EXACT)
    assert type(model.module).__name__ == "CpuDecoder"
    assert_equals_transformers(model, reference)
    by_modules = load_model(str(folder), rules=str(SHIPPED_RULES / "modules.yaml"))
    assert type(by_modules.module).__name__ == "GptOssForCausalLM"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up_proj_scales": None}, "has no gate_up_proj, and not both of gate_up_proj_blocks and gate_up_proj_s"),
        ({"down_proj_scales": (8, 64, 2)}, r"down_proj_blocks \[8, 64, 1, 16\] and down_proj_scales \[8, 64, 2\] must"),
        ({"down_proj_bias": None}, r"experts.down_proj_bias must be \[8, 64\], it is missing"),
        ({"down_proj_bias": (8, 32)}, r"experts.down_proj_bias must be \[8, 64\], it is \[8, 32\]"),
        ({"gate_up_proj_blocks": (8, 63, 2, 16), "gate_up_proj_scales": (8, 63, 2)}, r"bias must be \[8, 63\], it is"),
    ],
)
def test_damaged_parts_are_refused(
    change: dict[str, tuple[int, ...] | None],
    message: str,
    quantised: tuple[Tensors, Tensors],
    make_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    tensors = quantised[0]
    for name, shape in change.items():
        del tensors[f"{MODULE}.{name}"]
        if shape is not None:
            tensors[f"{MODULE}.{name}"] = torch.zeros(shape, dtype=torch.float32 if "bias" in name else torch.uint8)
    with pytest.raises(CheckpointError, match=message):
        open_folder(write_folder(tmp_path / "damaged", make_model("gpt_oss"), tensors, quantization("mxfp4")))


def test_an_exponent_that_is_nan_is_refused(
    quantised: tuple[Tensors, Tensors], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = quantised[0]
    tensors[f"{MODULE}.down_proj_scales"][3, 5, 0] = 255
    folder = write_folder(tmp_path / "nan", make_model("gpt_oss"), tensors, quantization("mxfp4"))
    with pytest.raises(CheckpointError, match=r"tensor 'model.*0\.mlp.experts.down_proj_scales' has NaN, in expert 3"):
        load_model(str(folder))


def test_bytes_elsewhere_and_other_methods_are_refused(
    quantised: tuple[Tensors, Tensors], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = quantised[0]
    with pytest.raises(CheckpointError, match="quantised with HQQ, which is not supported"):
        open_folder(write_folder(tmp_path / "hqq", make_model("gpt_oss"), tensors, quantization("hqq")))
    with pytest.raises(CheckpointError, match="quantised with MXFP4, which is not supported"):
        open_folder(write_folder(tmp_path / "other", make_model("qwen3_moe"), tensors, quantization("mxfp4")))
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"'model\.norm.weight' is stored as U8, which is not supported"):
        open_folder(write_folder(tmp_path / "bytes", make_model("gpt_oss"), tensors, quantization("mxfp4")))
