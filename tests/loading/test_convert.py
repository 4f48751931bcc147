"""The converter: one file is enough to serve, and what cannot be converted is refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from decoder_families import feed
from rope_parameters import LLAMA3_ROPE

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.checkpoint import open_gguf
from ktqueue.loading.gguf.header import read_header
from ktqueue.loading.gguf.mixes import Mix
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.load import load_model
from ktqueue.loading.next_token_layer import load_next_token_layer, next_token_layer_size
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators.next_token_layer import NextTokenLayer


def test_one_file_carries_config_tokenizer_template_and_licence(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    seen: list[tuple[int, int, str]] = []
    convert(
        tiny,
        target,
        experts="q4_0",
        dense="q8_0",
        name="Tiny",
        license="mit",
        progress=lambda done, total, name: seen.append((done, total, name)),
    )
    metadata = read_header(target).metadata
    assert metadata["general.name"] == "Tiny" and metadata["general.license"] == "mit"
    assert metadata["general.architecture"] == "qwen3moe"
    assert seen[0] == (0, seen[0][1], seen[0][2]) and seen[-1][0] == seen[-1][1] == len(seen) - 1
    wanted, got = json.loads((tiny / "config.json").read_text()), load_model(str(target)).config.to_dict()
    for key in ("hidden_size", "num_hidden_layers", "moe_intermediate_size", "rms_norm_eps", "rope_parameters"):
        assert got[key] == wanted[key], key
    assert got["num_local_experts"] == 8 and got["vocab_size"] == 384 and got["eos_token_id"] == 382
    assert load_tokenizer(str(target)).chat_template == load_tokenizer(str(tiny)).chat_template


def test_query_key_and_value_of_a_ling_are_one_tensor(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """llama.cpp reads no other files of this architecture."""
    folder, target = make_model("bailing_moe_v2"), tmp_path / "model.gguf"
    convert(folder, target, experts="f32", dense="f32")
    shapes = {tensor.name: tensor.shape for tensor in read_header(target).tensors}
    assert shapes["blk.1.attn_qkv.weight"] == ((4 + 2 * 2) * 32, 64)
    assert not any(".attn_q." in name or ".attn_k." in name for name in shapes)
    published, converted = (load_model(str(path)).module for path in (folder, target))
    assert torch.equal(*(torch.cat([*feed(module).values()]) for module in (published, converted)))


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 2.0}])
def test_rope_scaling_survives_the_conversion(
    rope: dict[str, object], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    full = {**rope, "rope_theta": 5e5}
    if rope["rope_type"] == "yarn":
        full["original_max_position_embeddings"] = 128
    folder = make_model(rope_parameters=full)
    convert(folder, tmp_path / "model.gguf", experts="f32", dense="f32")
    got = load_model(str(tmp_path / "model.gguf"))
    assert {key: got.config.rope_parameters[key] for key in full} == full
    wanted = load_model(str(folder)).module.get_buffer("rotary.inv_freq")
    assert got.module.get_buffer("rotary.inv_freq").equal(wanted)


def test_rows_that_are_not_whole_blocks_become_f16(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model(moe_intermediate_size=48)
    convert(folder, tmp_path / "model.gguf", experts="q4_0", dense="q8_0")
    types = {info.name: info.type_id for info in read_header(tmp_path / "model.gguf").tensors}
    assert types["blk.0.ffn_down_exps.weight"] == 1  # F16
    assert types["blk.0.ffn_up_exps.weight"] == 2  # Q4_0
    load_model(str(tmp_path / "model.gguf"))


def test_a_mix_gives_some_tensors_more_bits(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Rows of 256 are whole K blocks; those of 32, the width of experts, get other formats, as in llama.cpp."""
    folder, target = make_model(hidden_size=256, num_hidden_layers=4), tmp_path / "model.gguf"
    convert(folder, target, mix="q4_k_m")
    header = read_header(target)
    assert header.metadata["general.file_type"] == int(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    types = {info.name: gguf.GGMLQuantizationType(info.type_id).name for info in header.tensors}
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == "Q4_K"
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.attn_norm.weight"] == "F32"
    parts = ("attn_v", "Q8_0", "Q8_0"), ("ffn_down_exps", "Q5_0", "Q8_0"), ("attn_q", "Q4_K", "Q4_K")
    for part, early, late in parts:
        assert [types[f"blk.{layer}.{part}.weight"] for layer in range(4)] == [early, early, late, late]
    load_model(str(target))


@pytest.mark.parametrize(
    ("name", "tensor", "formats"),
    [
        ("Q4_K_M", "attn_v", "64464466"),
        ("Q4_K_S", "ffn_down_exps", "54444444"),
        ("Q3_K_M", "attn_v", "55444444"),
        ("Q2_K", "ffn_down", "33333333"),
    ],
)
def test_layers_with_more_bits_are_those_of_llama_cpp(name: str, tensor: str, formats: str) -> None:
    mix = Mix(
        name, layers=8, experts=64, shared_values=2, value_layers=tuple(range(8)), has_output=True, has_importance=False
    )
    found = [mix.format_of(f"blk.{layer}.{tensor}.weight", 512) for layer in range(8)]
    assert found == [f"Q{bits}_K" for bits in formats]
    assert mix.format_of("blk.0.attn_q.weight", 40) == "F16"


@pytest.mark.parametrize(
    ("model_type", "value_heads", "few", "bits"),
    [("llama", 8, "5", "6"), ("llama", 64, "4", "6"), ("qwen2", 64, "5", "6"), ("qwen3", 8, "4", "6")],
)
def test_values_of_a_70b_model_have_at_least_five_bits(model_type: str, value_heads: int, few: str, bits: str) -> None:
    """llama.cpp's llama_tensor_get_type: of 80 layers, Llamas with shared values and all of Qwen2 are such models."""
    config = {"model_type": model_type, "num_attention_heads": 64, "num_key_value_heads": value_heads}
    names = [f"blk.{layer}.attn_v.weight" for layer in range(80)]
    mix = Mix.of_model("Q4_K_M", {**config, "num_hidden_layers": 80}, names, has_importance=False)
    found = [mix.format_of(name, 8192) for name in names]
    early = [f"Q{bits}_K"] * 10
    assert found[:10] == early and found[10:13] == [f"Q{few}_K", f"Q{few}_K", f"Q{bits}_K"] and found[70:] == early


def add_next_token_layer(folder: Path, target: Path, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Copy the folder with a layer that predicts further tokens, like the last one. `names`: of its other tensors, by
    their ending in GGUF. Returns the added tensors by their name without the layer."""
    copy_with({"num_nextn_predict_layers": 1}, folder, target)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    added = {name[15:]: tensor.clone() for name, tensor in weights.items() if name.startswith("model.layers.1.")}
    layer = names["layer"]
    weights |= {layer + name: tensor for name, tensor in added.items()}
    added["eh_proj.weight"] = torch.arange(64.0 * 128).reshape(64, 128) / 8192
    added |= {f"{part}.weight": torch.rand(64) for part in ("enorm", "hnorm", "shared_head.norm")}
    weights |= {names.get(part, f"{layer}{part}"): added[part] for part in [*added][-4:]}
    safetensors.torch.save_file(weights, target / "model.safetensors")
    return added


OF_QWEN = {
    "layer": "mtp.layers.0.",
    "eh_proj.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "shared_head.norm.weight": "mtp.norm.weight",
}


@pytest.mark.parametrize(
    ("model_type", "architecture", "names", "plus"),
    [
        ("glm4_moe", "glm4moe", {"layer": "model.layers.2."}, 0),
        ("deepseek_v32", "deepseek32", {"layer": "model.layers.2."}, 0),
        ("qwen3_next", "qwen3next", OF_QWEN, 1),
    ],
)
def test_layers_that_predict_further_tokens_are_kept(
    model_type: str,
    architecture: str,
    names: dict[str, str],
    plus: int,
    make_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """llama.cpp's converter gives them the same names; norms of Qwen3-Next are stored with 1 added."""
    added = add_next_token_layer(make_model(model_type), tmp_path, names)
    target = tmp_path / "model.gguf"
    assert convert(tmp_path, target, experts="f32", dense="f32") == ""
    reader = gguf.GGUFReader(target)
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    for key, count in (("block_count", 3), ("nextn_predict_layers", 1)):
        assert reader.fields[f"{architecture}.{key}"].contents() == count
    np.testing.assert_array_equal(stored["blk.2.nextn.eh_proj.weight"], added["eh_proj.weight"].numpy())
    for part in ("enorm", "hnorm", "shared_head.norm"):
        wanted = added[f"{part}.weight"].numpy() + np.float32(plus)
        np.testing.assert_array_equal(stored[f"blk.2.nextn.{part.replace('.', '_')}.weight"], wanted)
    down = added["mlp.experts.7.down_proj.weight"]
    np.testing.assert_array_equal(stored["blk.2.ffn_down_exps.weight"][7], down.numpy())
    served = {name for name in open_gguf(target).names() if "layers.2." in name or "nextn" in name}
    assert not served and type(load_model(str(target)).module).__name__ == "CpuDecoder"
    written, folder = open_gguf(target, next_tokens=True), open_folder(tmp_path, next_tokens=True)
    assert sorted(written.names()) == sorted(folder.names())
    for name in written.names():
        torch.testing.assert_close(written.decode(name, torch.float32), folder.decode(name, torch.float32))
    layers = [load_next_token_layer(load_model(str(path)), path) for path in (target, tmp_path)]
    assert {type(layer) for layer in layers} == {NextTokenLayer}
    sizes = [next_token_layer_size(path, 2, 4096) for path in (target, tmp_path)]
    assert sizes[0] == sizes[1]
    convert(tmp_path, target, mix="q4_k_m", next_tokens=False)
    with pytest.raises(CheckpointError, match="has no layer that predicts further tokens"):
        load_next_token_layer(load_model(str(target)), target)
    assert not any("blk.2." in tensor.name for tensor in gguf.GGUFReader(target).tensors)


@pytest.mark.parametrize(
    ("missing", "shape", "words"),
    [
        ("eh_proj.weight", None, "tensor 'model.layers.2.eh_proj.weight' is missing"),
        ("self_attn.q_proj.bias", None, "tensor 'model.layers.2.self_attn.q_proj.bias' is missing"),
        ("mlp.experts.7.", None, r"'model.layers.2.mlp.experts.down_proj' must be \[8, 64, 32\], it is \[7, 64, 32\]"),
        ("input_layernorm.weight", 32, r"'model.layers.2.input_layernorm.weight' must be \[64\], it is \[32\]"),
    ],
)
def test_a_layer_that_is_not_complete_is_left_out(
    missing: str, shape: int | None, words: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    layer, file = "model.layers.2.", tmp_path / "model.safetensors"
    add_next_token_layer(make_model("glm4_moe", attention_bias=True), tmp_path, {"layer": layer})
    weights = safetensors.torch.load_file(file)
    for name in [name for name in weights if name.startswith(layer + missing)]:
        del weights[name]
        if shape:
            weights[name] = torch.zeros(shape)
    safetensors.torch.save_file(weights, file)
    left_out = convert(tmp_path, tmp_path / "model.gguf", experts="f16")
    assert re.fullmatch(f"1 layer that predicts further tokens is left out: .*{words}", left_out)
    assert "glm4moe.nextn_predict_layers" not in gguf.GGUFReader(tmp_path / "model.gguf").fields


def test_layers_without_a_place_in_gguf_are_named(make_model: Callable[..., Path], tmp_path: Path) -> None:
    add_next_token_layer(make_model("dots1"), tmp_path, {"layer": "model.layers.2."})
    left_out = convert(tmp_path, tmp_path / "model.gguf", experts="f16")
    assert left_out == "1 layer that predicts further tokens is left out: GGUF's dots1 has no place for it"
    load_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(("model_type", "heads"), [("llama", 4), ("mixtral", 4)])
def test_llama_queries_are_written_in_the_rotary_order_of_gguf(
    model_type: str, heads: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Rotated pairs are side by side in GGUF and half a head apart in transformers."""
    folder, target = make_model(model_type), tmp_path / "model.gguf"
    convert(folder, target, experts="f32", dense="f32")
    header = read_header(target)
    (info,) = [tensor for tensor in header.tensors if tensor.name == "blk.0.attn_q.weight"]
    stored = header.data[info.offset :][: 4 * 64 * 64].view(np.float32).reshape(heads, 16, 64)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    rows = weights["model.layers.0.self_attn.q_proj.weight"].numpy().reshape(heads, 16, 64)
    np.testing.assert_array_equal(stored[:, 0::2], rows[:, :8])
    np.testing.assert_array_equal(stored[:, 1::2], rows[:, 8:])


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        (
            "gemma3_text",
            {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256},
        ),
        ("llama", {"num_key_value_heads": 4}),
    ],
)
def test_sizes_that_a_config_does_not_state_are_those_of_transformers(
    model_type: str, sizes: dict[str, int], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """As in Gemma 3's published configs, and those of the first Llama."""
    copy_with({}, make_model(model_type, **sizes), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: config[key] for key in config.keys() - sizes.keys()}))
    convert(tmp_path, tmp_path / "model.gguf", experts="f32", dense="f32")
    config = load_model(str(tmp_path / "model.gguf")).config.to_dict()
    assert {key: config[key] for key in sizes} == sizes


def test_a_dense_model_is_of_the_type_of_its_matrices(make_model: Callable[..., Path], tmp_path: Path) -> None:
    convert(make_model("qwen3"), tmp_path / "model.gguf", experts="q4_0", dense="mxfp4")
    header = read_header(tmp_path / "model.gguf")
    assert header.metadata["general.architecture"] == "qwen3"
    assert header.metadata["general.file_type"] == int(gguf.LlamaFileType.MOSTLY_MXFP4_MOE)
    assert not any("expert" in key for key in header.metadata)
    assert {info.type_id for info in header.tensors if len(info.shape) == 2} == {int(gguf.GGMLQuantizationType.MXFP4)}


def copy_with(change: dict[str, object], source: Path, target: Path) -> None:
    """Copy the folder, with another config."""
    for file_name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (target / file_name).write_bytes((source / file_name).read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, but there are tensors of 2 layers"),
        ({"hidden_act": 3}, "config is not valid"),
        ({"moe_intermediate_size": 64}, "of the wrong shape: model.layers.0.mlp.experts.gate_up_proj"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "config is not valid: .*'factor'"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_not_written(
    change: dict[str, object], words: str, tiny: Path, tmp_path: Path
) -> None:
    copy_with(change, tiny, tmp_path)
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path, tmp_path / "model.gguf", experts="f16")
    assert not list(tmp_path.glob("*.gguf*"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"merges":', '"odd":', "Missing vocab/merges"),
        ('"pattern":', '"odd":', "missing field `pattern`"),
        ('"content": "<|im_end|>"', '"content": 5', "expected a string"),
        ("{{ m.role }}", "{% if %}", "the chat template does not parse"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_not_written(
    old: str, new: str, words: str, tiny: Path, tmp_path: Path
) -> None:
    copy_with({}, tiny, tmp_path)
    changed = 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tiny / name).read_text()
        changed += text.count(old)
        (tmp_path / name).write_text(text.replace(old, new))
    assert changed
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path, tmp_path / "model.gguf", experts="f16")
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_sliding_window_is_not_converted(make_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="sliding_window is 3; GGUF's llama implies None"):
        convert(make_model("mixtral", sliding_window=3), tmp_path / "model.gguf", experts="f16")


def test_tokens_that_the_model_does_not_have_are_refused(tiny: Path, tmp_path: Path) -> None:
    copy_with({"vocab_size": 100, "eos_token_id": None}, tiny, tmp_path)
    weights = safetensors.torch.load_file(tiny / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:100].clone()
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="token id 299 is outside the model's vocabulary of 100"):
        convert(tmp_path, tmp_path / "model.gguf", experts="f16")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "Mamba is not supported: it has layers that keep a state"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; GGUF's qwen3moe implies True"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": LLAMA3_ROPE}, "rope_type 'llama3' cannot be written"),
    ],
)
def test_values_that_gguf_cannot_express_are_refused(
    change: dict[str, object], words: str, tiny: Path, tmp_path: Path
) -> None:
    copy_with(change, tiny, tmp_path)
    target = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path, target, experts="f16")
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_failed_conversion_leaves_no_file(tiny: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny, tmp_path / "model.gguf", experts="f16", progress=stop)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("types", [{"experts": "iq2_xs"}, {"experts": "f16", "dense": "int8"}, {"mix": "q4_k"}])
def test_types_that_cannot_be_written_are_refused(types: dict[str, str], tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write (experts|dense|mix) as .*; known: .*q2_k"):
        convert(tiny, tmp_path / "model.gguf", **types)  # type: ignore[arg-type]


def test_an_unknown_pre_tokenizer_is_refused(tiny: Path, tmp_path: Path) -> None:
    for file_name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / file_name).write_bytes((tiny / file_name).read_bytes())
    document = json.loads((tiny / "tokenizer.json").read_text())
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "a+"
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"unknown pre-tokenizer .*known: default, gpt-2, .*qwen2"):
        convert(tmp_path, tmp_path / "model.gguf", experts="f16")


def test_layers_with_a_gap_between_them_are_left_out(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Each number up to the last would need the names of a layer."""
    add_next_token_layer(make_model("qwen3_next"), tmp_path, {**OF_QWEN, "layer": "mtp.layers.999999."})
    left_out = convert(tmp_path, tmp_path / "model.gguf", experts="f32", dense="f32")
    assert "must be numbered from 0 on, one of 2 is 999999" in left_out
