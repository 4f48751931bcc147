"""A damaged model file raises a CheckpointError that names the file, or gives a model that loads."""

import json
import random
from pathlib import Path

import pytest

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.header import ModelMetadata, read_header
from ktqueue.loading.load import load_model, open_checkpoint
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer


def _try(path: Path) -> bool:
    """Whether the model loads. Any exception but a CheckpointError that names the file fails the test."""
    try:
        load_model(str(path))
        load_tokenizer(str(path))
    except CheckpointError as error:
        assert path.stem in str(error) or path.parent.name in str(error)
        return False
    return True


def test_a_truncated_gguf_file_is_an_error_that_names_it(tiny_gguf: Path, tmp_path: Path) -> None:
    raw = tiny_gguf.read_bytes()
    header = min(tensor.offset for tensor in read_header(tiny_gguf).tensors)
    path = tmp_path / "cut.gguf"
    rng = random.Random(5)
    cuts = [0, 1, 3, 4, 8, 24, header - 1, header, len(raw) - 1]
    cuts += [rng.randrange(header) for _ in range(25)] + [rng.randrange(len(raw)) for _ in range(25)]
    for cut in cuts:
        path.write_bytes(raw[:cut])
        with pytest.raises(CheckpointError, match=r"cut.gguf: .*(truncated|empty)"):
            load_model(str(path))
        if cut < header // 2:
            with pytest.raises(CheckpointError, match=r"cut.gguf: .*(truncated|empty)"):
                load_tokenizer(str(path))


def test_flipped_header_bytes_are_an_error_or_a_model(tiny_gguf: Path, tmp_path: Path) -> None:
    raw = tiny_gguf.read_bytes()
    header = min(tensor.offset for tensor in read_header(tiny_gguf).tensors)
    path = tmp_path / "flipped.gguf"
    rng = random.Random(6)
    loaded = 0
    for _ in range(200):
        damaged = bytearray(raw)
        for _ in range(rng.choice([1, 1, 2, 4])):
            damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        loaded += _try(path)
    assert 0 < loaded < 200


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, (1).to_bytes(4, "little"), "version 1 is not supported"),
        (4, (3).to_bytes(4, "big"), "big-endian"),
        (8, (1 << 62).to_bytes(8, "little"), "the tensor count is"),
        (16, (1 << 62).to_bytes(8, "little"), "the metadata count is"),
        (24, (1 << 40).to_bytes(8, "little"), "the length of a metadata key is"),
    ],
)
def test_absurd_numbers_are_refused(position: int, value: bytes, words: str, tiny_gguf: Path, tmp_path: Path) -> None:
    raw = bytearray(tiny_gguf.read_bytes())
    raw[position : position + len(value)] = value
    path = tmp_path / "absurd.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_million_layers_are_refused_before_a_skeleton_is_built(tiny_gguf: Path, tmp_path: Path) -> None:
    raw = tiny_gguf.read_bytes()
    position = raw.index(b"qwen3moe.block_count") + len(b"qwen3moe.block_count") + 4
    path = tmp_path / "deep.gguf"
    path.write_bytes(raw[:position] + (1_000_000).to_bytes(4, "little") + raw[position + 4 :])
    with pytest.raises(CheckpointError, match=r"qwen3moe\.block_count must be at most 4096, got 1000000"):
        load_model(str(path))


def test_a_truncated_safetensors_file_is_an_error_that_names_it(tiny: Path, tmp_path: Path) -> None:
    raw = (tiny / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    rng = random.Random(7)
    for cut in [0, 1, 7, 8, 9, len(raw) - 1] + [rng.randrange(len(raw)) for _ in range(20)]:
        (tmp_path / "model.safetensors").write_bytes(raw[:cut])
        with pytest.raises(CheckpointError, match=r"model.safetensors"):
            load_model(str(tmp_path))


def test_a_flipped_safetensors_header_is_an_error_or_a_model(tiny: Path, tmp_path: Path) -> None:
    raw = (tiny / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    rng = random.Random(8)
    for _ in range(100):
        damaged = bytearray(raw)
        damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        (tmp_path / "model.safetensors").write_bytes(damaged)
        _try(tmp_path)


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("lm_head.weight", "data_offsets", "those of model.embed_tokens.weight", r"must begin at byte \d+, got \d+"),
        ("lm_head.weight", "name", "lm_head.weight", r"the file has \d+ bytes, but its tensors end at \d+"),
        ("model.norm.weight", "name", "a\n\x1b[31m", r"1 to 1024 printable characters, got 'a\\n\\x1b\[31m'"),
        ("model.norm.weight", "name", "9" * 5_000, r"1 to 1024 printable characters, got '999"),
        ("model.norm.weight", "dtype", "F32\0", r"corrupt header entry of tensor 'model.norm.weight'"),
    ],
)
def test_a_safetensors_header_that_lies_is_refused(
    name: str, field: str, value: str, words: str, tiny: Path, tmp_path: Path
) -> None:
    """The safetensors library refuses these files too. Bytes after the last tensor belong to none."""
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    raw = (tiny / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    if field == "name":
        header[value] = header.pop(name)
    else:
        header[name][field] = header["model.embed_tokens.weight"][field] if field == "data_offsets" else value
    text = json.dumps(header).encode()
    data = raw[start:] + b"more" * ((field, value) == ("name", name))
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(str(tmp_path))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("offset", (0).to_bytes(8, "little"), r"tensor '[a-z0-9_.]+' must begin at byte \d+, got \d+"),
        ("type", (1).to_bytes(4, "little"), r"tensor '[a-z0-9_.]+' must begin at byte \d+, got \d+"),
        ("name", b"output_norm\x1bweight", r"a tensor name is not printable: 'output_norm\\x1bweight'"),
    ],
)
def test_a_gguf_tensor_that_lies_is_refused(
    field: str, value: bytes, words: str, tiny_gguf: Path, tmp_path: Path
) -> None:
    """llama.cpp refuses tensors with a gap between them, or shared bytes, too. This one is F32 and has 256 bytes."""
    raw = bytearray(tiny_gguf.read_bytes())
    name = raw.index(b"output_norm.weight")
    place = {"name": name, "type": name + 18 + 4 + 8, "offset": name + 18 + 4 + 8 + 4}[field]
    raw[place : place + len(value)] = value
    (path := tmp_path / "lies.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"lies.gguf: corrupt: {words}"):
        open_checkpoint(str(path))


def test_a_long_value_is_shortened_in_messages() -> None:
    with pytest.raises(
        CheckpointError, match=r"^here: metadata key a\.b must be a positive number, got 'xxx"
    ) as caught:
        ModelMetadata("a", {"a.b": "x" * 100_000}, "here").integer("b")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_json_files_are_an_error_or_a_model(name: str, tiny: Path, tmp_path: Path) -> None:
    for file_name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / file_name).write_bytes((tiny / file_name).read_bytes())
    raw = (tiny / name).read_bytes()
    rng = random.Random(9)
    for _ in range(40):
        damaged = bytearray(raw)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(raw)) :]
        else:
            damaged[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(damaged)
        _try(tmp_path)
