"""Checkpoints: names, shapes, formats and values from every container, and errors that name what is wrong."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from checkpoint_files import finish

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.header import read_header
from ktqueue.loading.load import load_model, open_checkpoint
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

EXPERTS = "model.layers.1.mlp.experts"


def _state(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.state_dict())


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("container", ["folder", "sharded", "gguf"])
def test_every_tensor_equals_what_transformers_loads(
    model_type: str, container: str, make_model: Callable[..., Path], make_gguf: Callable[..., Path]
) -> None:
    folder = make_model(model_type, shard="100KB" if container == "sharded" else None)
    checkpoint = open_checkpoint(str(make_gguf(model_type=model_type) if container == "gguf" else folder))
    state = _state(folder)
    assert sorted(checkpoint.names()) == sorted(state)
    for name, expected in state.items():
        assert checkpoint.shape(name) == tuple(expected.shape)
        assert checkpoint.quant(name) == "F32"
        assert checkpoint.nbytes(name) == expected.numel() * 4
        torch.testing.assert_close(checkpoint.decode(name, torch.float32), expected, atol=0, rtol=0)


@pytest.mark.parametrize("quant", ["f16", "bf16", "q8_0", "q4_0", "mxfp4"])
def test_weights_of_each_type_are_near_the_original(quant: str, tiny: Path, make_gguf: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(str(make_gguf(quant, quant)))
    bound = {"f16": 1e-3, "bf16": 5e-3, "q8_0": 1e-2, "q4_0": 0.12, "mxfp4": 0.2}[quant]
    for name, expected in _state(tiny).items():
        full = expected.dim() == 1 or name.endswith("mlp.gate.weight")
        assert checkpoint.quant(name) == ("F32" if full else quant.upper())
        error = checkpoint.decode(name, torch.float32) - expected
        assert error.norm() / expected.norm() <= (0 if full else bound), name


@pytest.mark.parametrize("container", ["folder", "fused", "gguf"])
def test_expert_weights_are_views_of_the_file(container: str, tiny: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    path = tiny_gguf if container == "gguf" else tiny
    state = _state(tiny)
    if container == "fused":
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
        path = tmp_path
    weights = open_checkpoint(str(path)).experts(EXPERTS)
    gate_up, down = state[f"{EXPERTS}.gate_up_proj"].numpy(), state[f"{EXPERTS}.down_proj"].numpy()
    for part, whole in ((weights.gate, gate_up[:, :32]), (weights.up, gate_up[:, 32:]), (weights.down, down)):
        assert (part.quant, part.rows, part.columns, len(part.data)) == ("F32", *whole.shape[1:], 8)
        for data, expected in zip(part.data, whole, strict=True):
            assert not data.flags.owndata and not data.flags.writeable
            np.testing.assert_array_equal(data.view(np.float32).reshape(expected.shape), expected)


def _split(source: Path, folder: Path, tensors: int) -> list[Path]:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe", split_max_tensors=tensors)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return sorted(folder.glob("*.gguf"))


def test_a_split_file_equals_the_whole_one(tiny_gguf: Path, tmp_path: Path) -> None:
    parts = _split(tiny_gguf, tmp_path, 10)
    assert len(parts) > 2 and parts[0].name == f"model-00001-of-0000{len(parts)}.gguf"
    whole = open_checkpoint(str(tiny_gguf))
    for part in (parts[0], parts[-1]):
        checkpoint = open_checkpoint(str(part))
        assert checkpoint.config() == whole.config()
        assert sorted(checkpoint.names()) == sorted(whole.names())
        for name in whole.names():
            assert torch.equal(checkpoint.decode(name, torch.float32), whole.decode(name, torch.float32))
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-.*part 2 of .* is missing"):
        open_checkpoint(str(parts[0]))


def test_a_renamed_part_of_a_split_file_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    parts = _split(tiny_gguf, tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"one of .* parts"):
        open_checkpoint(str(parts[0].rename(tmp_path / "renamed.gguf")))


def test_swapped_parts_are_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    parts = _split(tiny_gguf, tmp_path, 10)
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(CheckpointError, match="the header says part"):
        open_checkpoint(str(parts[0]))


def test_unsupported_type_is_named(tiny_gguf: Path, tmp_path: Path) -> None:
    header = read_header(tiny_gguf)
    raw = bytearray(tiny_gguf.read_bytes())
    name = b"blk.0.attn_q.weight"
    position = raw.index(name) + len(name) + 4 + 16  # name, dimension count, two dimensions
    assert raw[position : position + 4] == bytes(4)
    raw[position] = int(gguf.GGMLQuantizationType.Q8_1)
    path = tmp_path / "odd.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"odd.gguf: tensor 'blk.0.attn_q.weight' is stored as Q8_1"):
        open_checkpoint(str(path))
    raw[position] = 200
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="stored as type 200"):
        open_checkpoint(str(path))
    assert header.tensors


def test_an_unknown_architecture_lists_the_known_ones(tiny_gguf: Path, tmp_path: Path) -> None:
    raw = tiny_gguf.read_bytes().replace(b"qwen3moe", b"deepseek", 1)
    path = tmp_path / "odd.gguf"
    path.write_bytes(raw)
    known = (
        "afmoe, bailingmoe2, deepseek2, deepseek32, dots1, ernie4_5, ernie4_5-moe, exaone-moe, gemma2, gemma3, gemma4, "
        "glm-dsa, glm4moe, gpt-oss, granite, granitemoe, hunyuan-dense, hunyuan-moe, hy_v3, laguna, llama, llama4, "
        "mimo2, minimax-m2, mistral3, mistral4, olmoe, phi3, phimoe, qwen2, qwen2moe, qwen2vl, qwen3, qwen35, "
        "qwen35moe, qwen3moe, qwen3next, qwen3vl, qwen3vlmoe, seed_oss, step35"
    )
    with pytest.raises(CheckpointError, match=rf"'deepseek' is not supported; known: {known}$"):
        open_checkpoint(str(path))


def test_unknown_tensor_in_gguf_is_named(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(tiny_gguf.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight"))
    with pytest.raises(CheckpointError, match=r"tensor 'blk.0.attn_z.weight' is unknown in the architecture qwen3moe"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "stored as F8_E4M3"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}, "12 bytes are stored, but its shape needs 16"),
        ({"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}, "truncated or corrupt"),
        ({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}, "corrupt header entry"),
        ({"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}, r"has an empty dimension: \[0, 4\]"),
        ({"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}, "corrupt header entry"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [-1 << 70, 16]}, "needs bytes|corrupt"),
        ({"shape": [4]}, "corrupt header entry"),
        ({"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}, "corrupt header entry"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "corrupt header entry"),
        ({"dtype": "F32", "shape": [1 << 62] * 400, "data_offsets": [0, 16]}, "corrupt header entry"),
        ({"dtype": "F" * 1_000, "shape": [4], "data_offsets": [0, 16]}, "corrupt header entry"),
        ([], "corrupt header entry"),
    ],
)
def test_corrupt_safetensors_entries_are_refused(entry: object, words: str, tiny: Path, tmp_path: Path) -> None:
    header = json.dumps({"model.norm.weight": entry}).encode()
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(str(tmp_path))
    assert "model.safetensors" in str(caught.value)


def test_gate_and_up_of_two_shapes_are_named(tiny: Path, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(tiny / "model.safetensors")
    for name in [name for name in weights if ".layers.1." in name and name.endswith("up_proj.weight")]:
        weights[name] = weights[name][:-1].clone()
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts: gate is \[.*\], up is \[.*\]"):
        open_checkpoint(str(tmp_path))


def test_missing_experts_are_named(tiny: Path, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(tiny / "model.safetensors")
    del weights["model.layers.1.mlp.experts.5.up_proj.weight"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts: no up weights for experts \[5\]"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "experts.03.gate_proj.weight",
            r"experts.0?3.gate_proj.*experts.0?3.gate_proj.* are the same weights of one expert",
        ),
        ("experts.down_proj", "layers.1.mlp.experts has its weights twice, expert by expert and fused"),
    ],
)
def test_experts_stored_twice_are_named(name: str, words: str, tiny: Path, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(tiny / "model.safetensors")
    weights[f"model.layers.1.mlp.{name}"] = torch.zeros(32, 64)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_pointers_of_git_lfs_are_named(name: str, tiny: Path, tmp_path: Path) -> None:
    """A clone without Git LFS has pointers instead of the large files."""
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (file := tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:5f\nsize 23\n")
    with pytest.raises(CheckpointError, match=f"{name}: this is a Git LFS pointer, not the file itself"):
        open_checkpoint(str(file if name.endswith("gguf") else tmp_path))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_missing_files_are_named(missing: str, tiny: Path, tmp_path: Path) -> None:
    for name in {"config.json", "model.safetensors"} - {missing}:
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    with pytest.raises(CheckpointError, match=missing):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("pytorch_model-00001-of-00002.bin", "is not read, because a pickle can run code: convert it to safetensors"),
        ("adapter_model.safetensors", "is an adapter: merge it with its model first"),
        ("consolidated.00.safetensors", "is in Mistral's own layout, which is not read"),
    ],
)
def test_weights_that_are_not_read_are_named(name: str, problem: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path))
    assert str(caught.value) == f"{tmp_path}: there are no weights in safetensors, and {name} {problem}"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_pipes_and_devices_are_not_read(name: str, tiny: Path, tmp_path: Path) -> None:
    """They may have no end, and a clone of a repository may have links to them."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    for target in ("/dev/zero", "pipe"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(target)
        if target == "pipe":
            os.mkfifo(tmp_path / target)
        with pytest.raises(CheckpointError, match=rf"{name}: must be a file, not a pipe or a device"):
            open_checkpoint(str(tmp_path)) if name.startswith(("config", "model")) else load_tokenizer(str(tmp_path))


def test_a_number_of_an_expert_may_not_be_huge(tiny: Path, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(tiny / "model.safetensors")
    weights[f"{EXPERTS}.{'9' * 500}.up_proj.weight"] = torch.zeros(32, 64)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"surplus: .*99999"):
        load_model(str(tmp_path))


def test_layers_that_predict_further_tokens_are_ignored(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None], tmp_path: Path
) -> None:
    """transformers has no modules for these layers, but knows the names of their tensors."""
    folder = make_model("exaone_moe")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    extra = {name.replace("model.", "mtp."): weights[name].clone() for name in weights if "layers.1." in name}
    assert any(".experts." in name for name in extra)
    safetensors.torch.save_file(weights | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equals_transformers(load_model(str(tmp_path)), folder)
    safetensors.torch.save_file(weights | {"mpt.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"surplus: mpt.weight"):
        load_model(str(tmp_path))


def test_files_of_any_name_are_read_without_an_index(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source = make_model("qwen3_moe")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    for part, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), 1):
        file = tmp_path / f"fox-4bit-{part}.safetensors"
        safetensors.torch.save_file({name: tensors[name] for name in names}, file)
    for other in ("consolidated", "adapter_model"):
        safetensors.torch.save_file({"odd": tensors["model.norm.weight"]}, tmp_path / f"{other}.safetensors")
    assert sorted(open_checkpoint(str(tmp_path)).names()) == sorted(open_checkpoint(str(source)).names())


def test_a_single_file_has_precedence_over_an_index(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """transformers does the same if a model was saved twice into one folder."""
    shutil.copytree(make_model("llama", shard="100KB"), tmp_path, dirs_exist_ok=True)
    weights = safetensors.torch.load_file(make_model("llama") / "model.safetensors")
    weights["model.norm.weight"] = torch.full((64,), 3.0)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors.index.json").exists()
    found = open_checkpoint(str(tmp_path)).decode("model.norm.weight", torch.float32)
    torch.testing.assert_close(found, _state(tmp_path)["model.norm.weight"], atol=0, rtol=0)
    assert found[0] == 3


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "a\0.safetensors", "", "..", "config.json", f"{'a' * 5_000}.safetensors"]
)
def test_an_index_must_stay_in_its_folder(name: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"must name \.safetensors files of this folder") as caught:
        open_checkpoint(str(tmp_path))
    assert len(str(caught.value)) < 400


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(str(tmp_path / "nothing.gguf"))


def test_unknown_names_are_errors(tiny: Path) -> None:
    checkpoint = open_checkpoint(str(tiny))
    for call in (checkpoint.shape, checkpoint.quant, checkpoint.nbytes, checkpoint.experts):
        with pytest.raises(CheckpointError, match="no_such"):
            call("no_such")


def _resident(path: Path) -> int:
    """Return the bytes of the file that this process's maps of it hold in memory."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    sizes = [re.search(r"^Rss: +(\d+)", text, re.MULTILINE) for text in maps if str(path) in text]
    return sum(1024 * int(size[1]) for size in sizes if size)


def test_file_pages_are_dropped_while_a_model_is_loaded(tiny_gguf: Path) -> None:
    seen: list[int] = []
    load_model(str(tiny_gguf), progress=lambda *_: seen.append(_resident(tiny_gguf)))
    assert len(seen) > 10
    assert max(seen) == 0


def test_a_kimi_k2_is_a_deepseek_v3(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None], tmp_path: Path
) -> None:
    """Its folders say so with code of their own, which is never run."""
    folder = make_model("deepseek_v3")
    copy = shutil.copytree(folder, tmp_path / "model")
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model"}
    config = json.loads((copy / "config.json").read_text()) | {"model_type": "kimi_k2", "auto_map": code}
    (copy / "config.json").write_text(json.dumps(config))
    assert_equals_transformers(load_model(str(copy)), folder)


def test_numbers_may_be_stated_for_each_layer(
    make_model: Callable[..., Path], assert_equals_transformers: Callable[..., None], tmp_path: Path
) -> None:
    """As Hunyuan-A13B's config does. Layers that differ are refused."""
    folder = make_model("hunyuan_v1_moe")
    copy = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    changed = config | {"moe_topk": [2, 2], "num_experts": [8, 8], "num_shared_expert": [1, 1]}
    (copy / "config.json").write_text(json.dumps(changed))
    assert_equals_transformers(load_model(str(copy)), folder)
    (copy / "config.json").write_text(json.dumps(config | {"moe_topk": [2, 1]}))
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok must be from 1 to 8, .* got \[2, 1\]"):
        load_model(str(copy))


@pytest.mark.parametrize("container", ["folder", "gguf"])
def test_a_closed_checkpoint_takes_no_memory_but_its_views_are_valid(
    container: str, tmp_path: Path, make_model: Callable[..., Path], make_gguf: Callable[..., Path]
) -> None:
    folder = tmp_path / "model"  # copies, which no other test has mapped
    if container == "gguf":
        model = path = Path(shutil.copy(make_gguf(model_type="qwen3_moe"), tmp_path / "model.gguf"))
    else:
        model, path = Path(shutil.copytree(make_model("qwen3_moe"), folder)), folder / "model.safetensors"
    checkpoint = open_checkpoint(str(model))
    embedding = checkpoint.matrix("model.embed_tokens.weight").data
    before = embedding.copy()
    # A busy system may take pages back between the two calls.
    assert any(embedding.copy().nbytes <= _resident(path) for _ in range(10))
    checkpoint.close()
    assert _resident(path) == 0
    np.testing.assert_array_equal(embedding, before)
