"""Files whose tensors are fused or one for each expert hold the same model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import Checkpoint, CheckpointTensor
from ktqueue.loading.gguf.checkpoint import build_checkpoint

Tensors = dict[str, CheckpointTensor]
Parts = tuple[dict[str, Any], Tensors]


def joined(name: str, parts: list[CheckpointTensor], axis: int) -> CheckpointTensor:
    """Join tensors along the axis of their rows, as llama.cpp's converter does."""
    shape = parts[0].shape
    rows = sum(part.shape[axis] for part in parts)
    data = np.concatenate([part.data.reshape(*part.shape[: axis + 1], -1) for part in parts], axis)
    return CheckpointTensor(name, parts[0].quant, (*shape[:axis], rows, *shape[axis + 1 :]), data.reshape(-1))


def fused(tensors: Tensors) -> Tensors:
    """Fuse query, key and value, and gate and up of the experts, with their biases."""
    result = dict(tensors)
    for name in tensors:
        layer, _, ending = name.rpartition(".attn_q.")
        if layer:
            whole = f"{layer}.attn_qkv.{ending}"
            result[whole] = joined(whole, [result.pop(f"{layer}.attn_{part}.{ending}") for part in "qkv"], 0)
        layer, _, ending = name.rpartition(".ffn_gate_exps.")
        if layer:
            whole = f"{layer}.ffn_gate_up_exps.{ending}"
            parts = [result.pop(f"{layer}.ffn_{part}_exps.{ending}") for part in ("gate", "up")]
            result[whole] = joined(whole, parts, 1)
    return result


def one_by_one(tensors: Tensors) -> Tensors:
    """Store the experts as old files of Mixtral do."""
    result = {}
    for name, tensor in tensors.items():
        stem, _, _ = name.partition("_exps.weight")
        if stem == name:
            result[name] = tensor
            continue
        for index, data in enumerate(tensor.expert_views()):
            result[f"{stem}.{index}.weight"] = replace(tensor, shape=tensor.shape[1:], stored=data)
    return result


def assert_equal(found: Checkpoint, expected: Checkpoint) -> None:
    assert sorted(found.names()) == sorted(expected.names())
    for name in expected.names():
        assert torch.equal(found.decode(name, torch.float32), expected.decode(name, torch.float32)), name
        assert (found.nbytes(name), found.quant(name)) == (expected.nbytes(name), expected.quant(name))


@pytest.mark.parametrize(
    "model_type",
    ["qwen2_moe", "mixtral", "glm4_moe", "bailing_moe_v2", "mimo_v2_flash", "laguna", "step3p5", "gpt_oss", "llama"],
)
def test_fused_tensors_are_the_same_model(model_type: str, parts_of: Callable[..., Parts]) -> None:
    metadata, tensors = parts_of(model_type)
    expected = build_checkpoint("file", metadata, dict(tensors))
    changed = fused(tensors)
    assert any("attn_qkv" in name for name in changed)
    assert any("gate_up_exps" in name for name in changed) == (model_type != "llama")
    found = build_checkpoint("file", metadata, changed)
    assert_equal(found, expected)
    for module in expected.expert_modules():
        weights, wanted = found.experts(module), expected.experts(module)
        for part in ("gate", "up"):
            views = zip(getattr(weights, part).data, getattr(wanted, part).data, strict=True)
            assert all(np.array_equal(view, other) and view.flags.c_contiguous for view, other in views)


def test_experts_one_by_one_are_the_same_model(parts_of: Callable[..., Parts]) -> None:
    metadata, tensors = parts_of("mixtral")
    expected = build_checkpoint("file", metadata, dict(tensors))
    changed = one_by_one(tensors)
    assert "blk.1.ffn_down.3.weight" in changed
    assert_equal(build_checkpoint("file", metadata, dict(changed)), expected)
    without = {name: tensor for name, tensor in changed.items() if name != "blk.1.ffn_up.2.weight"}
    with pytest.raises(CheckpointError, match=r"file: model\.layers\.1\.mlp\.experts: no up weights for experts \[2\]"):
        build_checkpoint("file", metadata, without)
    both = changed | {"blk.1.ffn_down_exps.weight": tensors["blk.1.ffn_down_exps.weight"]}
    with pytest.raises(CheckpointError, match="layer 1 has its experts twice"):
        build_checkpoint("file", metadata, both)


def test_fused_tensors_of_another_shape_are_refused(parts_of: Callable[..., Parts]) -> None:
    metadata, tensors = parts_of("qwen3_moe")
    changed = fused(tensors)
    qkv = changed["blk.0.attn_qkv.weight"]
    cut = replace(qkv, shape=(192, 64), stored=qkv.data[: 192 * 64 * 4])
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_qkv.weight' has the shape \[192, 64\], 256 expected in"):
        build_checkpoint("file", metadata, changed | {"blk.0.attn_qkv.weight": cut})
    with pytest.raises(CheckpointError, match=r"attn_qkv.weight' holds the weights of 'blk.0.attn_k.weight' once more"):
        build_checkpoint("file", metadata, changed | {"blk.0.attn_k.weight": tensors["blk.0.attn_k.weight"]})
    odd = replace(changed["blk.0.ffn_gate_up_exps.weight"], shape=(8 * 64 * 64,))
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_gate_up_exps.weight' has the shape \[32768\], 0 expected"):
        build_checkpoint("file", metadata, changed | {"blk.0.ffn_gate_up_exps.weight": odd})
