"""GGUF files with linear attention, with tensors as llama.cpp's converter writes them, equal their folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoint_files import finish
from decoder_families import LINEAR, answers, feed
from tiny_tokenizer import write_tokenizer

from ktqueue.core.errors import CheckpointError
from ktqueue.families.table import family_of_type
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.gguf.linear import column_order, linear_config, linear_metadata
from ktqueue.loading.load import load_model

SIZES: dict[str, Any] = {
    **LINEAR,
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
KEYS = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 4,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 8,
    "rope.freq_base": 10_000.0,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 192,
    "full_attention_interval": 4,
}
EXPERT_KEYS = {
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 64,
}
DENSE_KEYS = {"feed_forward_length": 96}
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}


def in_turns(x: torch.Tensor, dim: int, width: int) -> torch.Tensor:
    """Put the 6 value heads of 2 key heads, `width` numbers each along `dim`, in the order 0, 3, 1, 4, 2, 5."""
    heads = x.reshape(*x.shape[:dim], 2, 3, width, *x.shape[dim + 1 :])
    return heads.transpose(dim, dim + 1).reshape(x.shape)


def stored(name: str, x: torch.Tensor, *, tiled: bool) -> torch.Tensor:
    """Return a tensor of a layer as the converter stores it."""
    leaf = name.rpartition("linear_attn.")[2]
    if tiled and leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        x = torch.cat([x[:64], in_turns(x[64:], 0, 32)])
    elif tiled and leaf == "in_proj_z.weight":
        x = in_turns(x, 0, 32)
    elif tiled and leaf in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        x = in_turns(x, 0, 1)
    elif tiled and leaf == "out_proj.weight":
        x = in_turns(x, 1, 32)
    if leaf == "A_log":
        return -x.exp()
    if leaf == "conv1d.weight":
        return x.squeeze(1)
    return x + 1 if name.endswith("norm.weight") and leaf != "norm.weight" else x


def split_projection(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split Qwen3-Next's projection, [query, key, 3 values, 3 gates] of each of 2 key heads."""
    groups = torch.split(x.reshape(2, -1, x.shape[1]), [16, 16, 96, 96], 1)
    query, key, value, gate = (part.flatten(0, 1) for part in groups)
    return {"in_proj_qkv": torch.cat([query, key, value]), "in_proj_z": gate}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(model, architecture, **changed keys) -> the file."""

    def go(model: Any, architecture: str, **changes: Any) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        kind = DENSE_KEYS if architecture == "qwen35" else EXPERT_KEYS
        for key, value in {**KEYS, **kind, **changes}.items():
            add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            (writer.add_array if isinstance(value, list) else add)(f"{architecture}.{key}", value)
        tiled = architecture.startswith("qwen35")
        for name, x in model.state_dict().items():
            for target, tensor in renamed(name, x, tiled=tiled):
                writer.add_tensor(target, np.ascontiguousarray(tensor.numpy()))
        finish(writer)
        return path

    return go


def renamed(name: str, x: torch.Tensor, *, tiled: bool) -> list[tuple[str, torch.Tensor]]:
    if not name.startswith("model.layers."):
        names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        return [(names.get(name, "output.weight"), x + 1 if name == "model.norm.weight" else x)]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if rest == "mlp.experts.gate_up_proj":
        gate, up = x.chunk(2, 1)
        return [(f"blk.{layer}.ffn_gate_exps.weight", gate), (f"blk.{layer}.ffn_up_exps.weight", up)]
    if rest.endswith("in_proj_qkvz.weight"):
        parts = split_projection(x)
        return [(f"blk.{layer}.{NAMES[f'linear_attn.{part}.weight']}", rows) for part, rows in parts.items()]
    x = stored(rest, x, tiled=tiled)
    return [(f"blk.{layer}.{NAMES[rest]}", x[0] if rest.endswith("shared_expert_gate.weight") else x)]


def make(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(5)
    factory: Any = transformers.AutoModelForCausalLM
    make_config: Any = transformers.CONFIG_MAPPING[model_type]
    model = factory.from_config(make_config(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "dt_bias", "A_log")):
                parameter.uniform_(0.5, 1.5)
    return model


KINDS = pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("qwen3_next", "qwen3next"), ("qwen3_5_moe_text", "qwen35moe"), ("qwen3_5_text", "qwen35")],
)


@KINDS
def test_logits_equal_those_of_transformers(model_type: str, architecture: str, write: Callable[..., Path]) -> None:
    model = make(model_type)
    loaded = load_model(str(write(model, architecture)))
    assert type(loaded.module).__name__ == "CpuDecoder"
    expected, found = answers(model), feed(loaded.module)
    for name, logits in expected.items():
        assert (found[name] - logits).abs().max() < 3e-4 * logits.abs().max()


@KINDS
def test_a_list_of_layers_has_precedence_over_the_interval(
    model_type: str, architecture: str, write: Callable[..., Path]
) -> None:
    """llama.cpp's converter lists them for every folder whose config has layer_types. The list may be longer."""
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    model = make(model_type, layer_types=kinds)
    are_linear = [False, True, True, False, False]
    loaded = load_model(str(write(model, architecture, **{"attention.recurrent_layers": are_linear})))
    expected, found = answers(model), feed(loaded.module)
    for name, logits in expected.items():
        assert (found[name] - logits).abs().max() < 3e-4 * logits.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.recurrent_layers": [True]}, r"recurrent_layers must be true or false for each of 4 layers"),
        ({"ssm.inner_size": 130}, r"qwen3next\.ssm\.inner_size 130 must be a multiple of the 6 value heads"),
        ({"full_attention_interval": 9}, r"full_attention_interval 9 is above the 4 layers"),
        ({"ssm.group_count": 4}, r"ssm_ba\.weight' is \[12, 64\], 12 rows for 4 key heads expected"),
    ],
)
def test_wrong_metadata_is_refused(changes: dict[str, Any], message: str, write: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(str(write(make("qwen3_next"), "qwen3next", **changes)))


def test_every_fourth_layer_has_keys_if_a_file_does_not_say() -> None:
    config = {"linear_num_value_heads": 4, "num_hidden_layers": 8}
    metadata = ModelMetadata("qwen3next", {"qwen3next.ssm.inner_size": 128}, "file")
    kinds = linear_config(family_of_type("qwen3_next").layout, metadata, config)["layer_types"]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [3, 7]


@KINDS
def test_a_folder_is_written_as_llama_cpp_does(model_type: str, architecture: str, tmp_path: Path) -> None:
    """Each number is where llama.cpp's converter puts it, and the file is served like the folder."""
    model, folder, file = make(model_type, vocab_size=384), tmp_path / "folder", tmp_path / "model.gguf"
    model.save_pretrained(folder)
    write_tokenizer(folder, 384)
    convert(folder, file, experts="f32", dense="f32")
    reader = gguf.GGUFReader(file)
    found = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    tiled = architecture != "qwen3next"
    wanted = dict(part for name, x in model.state_dict().items() for part in renamed(name, x, tiled=tiled))
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].shape == x.shape and torch.allclose(found[name], x, rtol=1e-6, atol=0), name
    keys = {**KEYS, **(DENSE_KEYS if architecture == "qwen35" else EXPERT_KEYS)}
    assert {key: reader.fields[f"{architecture}.{key}"].contents() for key in keys} == pytest.approx(keys)
    assert (f"{architecture}.rope.dimension_sections" in reader.fields) == tiled
    for name, logits in answers(model).items():
        assert (feed(load_model(str(file)).module)[name] - logits).abs().max() < 3e-4 * logits.abs().max()


def test_columns_are_ordered_like_those_of_files() -> None:
    """An importance matrix of a folder fits the file's output matrix, whose columns are value heads in turns."""
    name, columns = "model.layers.0.linear_attn.out_proj.weight", torch.arange(192)
    for model_type, wanted in (("qwen3_5_moe_text", in_turns(columns, 0, 32)), ("qwen3_next", columns)):
        layout = family_of_type(model_type).layout
        assert column_order(layout, name, 192, SIZES).tolist() == wanted.tolist()
        assert column_order(layout, "model.layers.0.mlp.up_proj.weight", 3, SIZES).tolist() == [0, 1, 2]


def test_layers_that_are_no_pattern_are_not_written() -> None:
    sizes = {"linear_value_head_dim": 16, "linear_num_value_heads": 2}
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    with pytest.raises(CheckpointError, match=r"folder: GGUF's qwen3next cannot express layer_types"):
        linear_metadata(family_of_type("qwen3_next").layout, {**sizes, "layer_types": kinds}, "folder")
