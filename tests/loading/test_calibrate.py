"""Importance matrices of our own: sums equal those of transformers' inputs, and llama.cpp's files are read."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from checkpoint_files import finish
from numpy.typing import NDArray

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.calibrate import calibrate, unused_experts
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.importance import ColumnSums, read_importance, write_importance
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

TEXT = "Once upon a time there was a fox and a crow; the crow had cheese. " * 9
CHUNK = 24


def squares_of(x: torch.Tensor) -> npt.NDArray[Any]:
    return x.reshape(-1, x.shape[-1]).double().square().sum(0).numpy()


@pytest.mark.parametrize("source", ["folder", "file"])
def test_sums_are_those_of_the_inputs_in_transformers(
    source: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model("qwen3_moe")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.requires_grad_(False)
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, inputs, name=name: seen.__setitem__(name, inputs))
    ids = torch.tensor(load_tokenizer(str(folder)).encode(TEXT)[: 3 * CHUNK]).reshape(3, CHUNK)
    with torch.inference_mode():
        model(ids)
    path = folder
    if source == "file":
        path = tmp_path / "model.gguf"
        convert(folder, path, experts="f32", dense="f32")
    steps: list[tuple[int, int]] = []
    sums, chunks = calibrate(
        str(path), TEXT, chunk_tokens=CHUNK, chunks=3, progress=lambda done, total, _: steps.append((done, total))
    )
    assert chunks == 3 and steps == [(1, 2), (2, 2)]  # layers
    for name, module in (("attn_q", "self_attn.q_proj"), ("attn_output", "self_attn.o_proj"), ("ffn_gate_inp", "mlp")):
        found, (x, *_) = sums[f"blk.1.{name}.weight"], seen[f"model.layers.1.{module}"]
        assert found.counts.tolist() == [72]
        np.testing.assert_allclose(found.squares[0], squares_of(x), rtol=1e-4)
    hidden, chosen, _ = seen["model.layers.1.mlp.experts"]
    experts = model.model.layers[1].mlp.experts
    for expert in range(8):
        x = hidden[(chosen == expert).any(1)]
        gate, up = (x @ experts.gate_up_proj[expert].T).chunk(2, -1)
        wanted = {"gate": x, "up": x, "down": torch.nn.functional.silu(gate) * up}
        for part, inputs in wanted.items():
            found = sums[f"blk.1.ffn_{part}_exps.weight"]
            assert found.counts[expert] == len(x)
            np.testing.assert_allclose(found.squares[expert], squares_of(inputs), rtol=1e-4, atol=1e-9)
    assert "output.weight" not in sums and "token_embd.weight" not in sums


@pytest.mark.parametrize("model_type", ["deepseek_v32", "gpt_oss", "llama4_text", "qwen3_next"])
def test_matrices_have_the_names_of_files(model_type: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Each matrix that is quantised has sums, but for parts of latent attention, and convert takes the file."""
    folder, target = make_model(model_type), tmp_path / "model.gguf"
    sums, _ = calibrate(str(folder), TEXT, chunk_tokens=8, chunks=2)
    write_importance(tmp_path / "imatrix.gguf", sums, text="tale.txt", chunks=2, chunk_tokens=8)
    convert(folder, target, experts="q4_0", dense="q8_0", importance=tmp_path / "imatrix.gguf")
    quantised = {tensor.name for tensor in gguf.GGUFReader(target).tensors if tensor.tensor_type.name.startswith("Q")}
    left = {name.split(".", 2)[-1] for name in quantised - sums.keys()}
    parts = {"attn_k_b.weight", "attn_v_b.weight"} if model_type == "deepseek_v32" else set()
    assert left <= parts | {"weight"}  # of the embedding and the output


def test_heads_of_a_part_have_their_own_importance(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """llama.cpp has one count, and the sums of all heads side by side."""
    folder, name, errors = make_model("deepseek_v32"), "blk.0.attn_v_b.weight", []
    convert(folder, tmp_path / "exact.gguf", experts="f32", dense="f32")
    (exact,) = [tensor.data for tensor in gguf.GGUFReader(tmp_path / "exact.gguf").tensors if tensor.name == name]
    heads, _, columns = exact.shape
    sums = ColumnSums(np.random.default_rng(1).lognormal(sigma=2, size=(1, heads * columns)), np.ones(1))
    write_importance(tmp_path / "imatrix.gguf", {name: sums}, text="tale.txt", chunks=1, chunk_tokens=1)
    for importance in (None, tmp_path / "imatrix.gguf"):
        convert(folder, tmp_path / "model.gguf", experts="f16", dense="q4_0", importance=importance)
        (found,) = [tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors if tensor.name == name]
        squares = np.square(gguf.dequantize(found.data, found.tensor_type).reshape(exact.shape) - exact)
        errors.append((squares * sums.squares.reshape(heads, 1, columns)).sum((1, 2)))
    assert (errors[1] < 0.9 * errors[0]).all()


def test_the_first_token_of_a_chunk_is_the_one_in_front_of_texts(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-imatrix replaces the token, so that chunks begin like prompts."""
    folder = str(make_model("qwen3"))
    plain = calibrate(folder, TEXT, chunk_tokens=1, chunks=3)[0]["blk.0.attn_q.weight"].squares
    encode = "ktqueue.loading.tokenizer.tokenizer.Tokenizer.encode"
    monkeypatch.setattr(encode, lambda _, text: [5, *range(9)] if text else [5])
    fronted = calibrate(folder, TEXT, chunk_tokens=1, chunks=3)[0]["blk.0.attn_q.weight"].squares
    monkeypatch.setattr(encode, lambda _, text: [5, 5, 5] if text else [])
    np.testing.assert_array_equal(calibrate(folder, TEXT, chunk_tokens=1)[0]["blk.0.attn_q.weight"].squares, fronted)
    assert not np.array_equal(plain, fronted)


def test_what_cannot_be_calibrated_is_refused(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("qwen3")
    with pytest.raises(CheckpointError, match=r"the text has \d tokens, which is less than a chunk of 24"):
        calibrate(str(folder), "Once.", chunk_tokens=CHUNK)
    encode = "ktqueue.loading.tokenizer.tokenizer.Tokenizer.encode"
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="token id 384 of the text is outside"):
        patched.setattr(encode, lambda *_: [5, 384])
        calibrate(str(folder), TEXT, chunk_tokens=1)
    with pytest.raises(CheckpointError, match="the model has 256 positions, a chunk 257 tokens"):
        calibrate(str(folder), TEXT, chunk_tokens=257)
    convert(make_model("qwen3_next"), tmp_path / "model.gguf", experts="f32")
    with pytest.raises(CheckpointError, match="GGUF files with linear attention cannot be calibrated"):
        calibrate(str(tmp_path / "model.gguf"), TEXT, chunk_tokens=CHUNK)
    with pytest.raises(CheckpointError, match="there is no GGUF architecture for model_type 'smollm3'"):
        calibrate(str(make_model("smollm3")), TEXT, chunk_tokens=CHUNK)


def test_experts_without_tokens_are_named() -> None:
    sums = {"a": ColumnSums.zeros(1, 2), "b": ColumnSums.zeros(3, 2)}
    sums["a"].add(torch.ones(4, 2))
    sums["b"].add(torch.ones(4, 2), expert=1)
    assert unused_experts(sums) == ["b: 2 of 3 experts got no token"]


def test_older_and_newer_files_of_llama_cpp_are_read(tmp_path: Path) -> None:
    """A .dat file has sums of means, without the number of experts; newer GGUF files have plain sums too."""
    means = np.arange(1, 13, dtype=np.float32)
    name, old, new = b"blk.0.ffn_up_exps.weight", tmp_path / "imatrix.dat", tmp_path / "imatrix.gguf"
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii", 5, 12) + (means * 5).tobytes()
    old.write_bytes(struct.pack("<i", 1) + entry + struct.pack("<ii", 5, 0))
    sums = ColumnSums(means.reshape(3, 4).astype(np.float64) * 7.0, np.full(3, 7.0))

    def read(path: Path) -> NDArray[np.float32]:
        matrix = read_importance(path)
        matrix.check({name.decode(): (3, 8, 4)})
        found = matrix.of_tensor(name.decode())
        assert found is not None
        return np.asarray(found)

    write_importance(new, {name.decode(): sums}, text="tale.txt", chunks=1, chunk_tokens=7)
    for path in (old, new):
        np.testing.assert_allclose(read(path), means.reshape(3, 4).tolist(), rtol=1e-6)
    writer = gguf.GGUFWriter(new, "")
    writer.add_string("general.type", "imatrix")
    for ending, values in ((".in_sum2", sums.squares), (".counts", sums.counts), (".in_sum", -sums.squares)):
        writer.add_tensor(name.decode() + ending, values.astype(np.float32))
    finish(writer)
    np.testing.assert_allclose(read(new), means.reshape(3, 4).tolist(), rtol=1e-6)
    for damaged, words in ((old.read_bytes()[:60], "it is truncated"), (entry, "truncated"), (b"", "truncated")):
        old.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=words):
            read_importance(old)
