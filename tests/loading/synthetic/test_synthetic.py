"""Synthetic models: valid blocks with the given deviation, files that load and compute, names that are checked."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import decode_rows
from ktqueue.loading.gguf.header import read_header
from ktqueue.loading.gguf.library import type_name
from ktqueue.loading.load import load_model, open_checkpoint
from ktqueue.loading.synthetic.checkpoint import build_vocabulary, write_synthetic
from ktqueue.loading.synthetic.random_blocks import random_blocks
from ktqueue.loading.synthetic.shapes import SHAPES, tensors_of
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.loading.weight_formats import BLOCKS, FOLDER_FORMATS


@pytest.mark.parametrize("quant", BLOCKS)
def test_random_blocks_have_the_given_deviation(quant: str) -> None:
    blocks = random_blocks(quant, 2000, 0.03, np.random.default_rng(3))
    elements, size = BLOCKS[quant]
    assert blocks.shape == (2000, size * max(1, 32 // elements))
    values = decode_rows(blocks.reshape(-1), quant, max(elements, 32))
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(0.03, rel=0.03)
    assert abs(values.mean()) < 0.001
    assert len(np.unique(values[:, 0])) > 10


@pytest.mark.parametrize(
    ("shape", "quant"), [*(("tiny", quant) for quant in ("q4_k_m", *map(str.lower, BLOCKS))), ("tiny-latent", "q4_k_m")]
)
def test_activations_keep_their_size(
    shape: str, quant: str, tmp_path: Path, run_logits: Callable[..., torch.Tensor]
) -> None:
    path = tmp_path / "model.gguf"
    if quant.upper() in FOLDER_FORMATS:
        with pytest.raises(CheckpointError, match=f"GGUF files have no format {quant}"):
            write_synthetic(f"synthetic:{shape}:{quant}", path)
        return
    write_synthetic(f"synthetic:{shape}:{quant}", path, layers=4)
    tokenizer = load_tokenizer(str(path))
    ids = tokenizer.encode("The fox and the crow went into the forest.")
    assert (
        b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == b"The fox and the crow went into the forest."
    )
    model = load_model(str(path))
    assert model.config.num_hidden_layers == 4
    assert model.card_facts.quantization == ("Q4_K" if quant == "q4_k_m" else quant.upper())
    logits = run_logits(model.module, model.kv_layout(16), ids)
    assert logits.shape[-1] == 512
    assert torch.isfinite(logits).all()
    assert 2 < logits.std() < 4


def test_the_mix_is_llama_cpps(tmp_path: Path) -> None:
    write_synthetic("synthetic:tiny:q4_k_m", tmp_path / "model.gguf", layers=16)
    types = {info.name: type_name(info.type_id) for info in read_header(tmp_path / "model.gguf").tensors}
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == "Q4_K"
    for name in ("ffn_down_exps", "attn_v"):
        more = [i for i in range(16) if types[f"blk.{i}.{name}.weight"] == "Q6_K"]
        assert more == [0, 1, 4, 7, 10, 13, 14, 15], name
    others = ("attn_q", "attn_k", "attn_output", "ffn_gate_exps", "ffn_up_exps")
    assert {types[f"blk.{i}.{name}.weight"] for i in range(16) for name in others} == {"Q4_K"}
    assert types["blk.3.ffn_gate_inp.weight"] == types["blk.3.ffn_norm.weight"] == "F32"


def test_the_same_call_writes_the_same_bytes_and_no_two_experts_are_equal(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_synthetic("synthetic:tiny:q4_0", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    header = read_header(tmp_path / "a")
    matrices = []
    for info in header.tensors:
        if info.name.endswith("_exps.weight"):
            size = 256 // 32 * 18
            rows = header.data[info.offset : info.offset + 8 * 256 * size].reshape(8, 256, size)
            assert all(len({bytes(row) for row in expert}) == 256 for expert in rows)
            matrices += [bytes(expert.data) for expert in rows]
    assert len(matrices) == len(set(matrices)) == 2 * 3 * 8


def test_rows_that_are_not_whole_blocks_are_q8_0() -> None:
    tensors = {tensor.name: tensor for tensor in tensors_of(SHAPES["deepseek-v2-lite"], "Q4_K_M")}
    assert tensors["blk.26.ffn_down_exps.weight"].shape == (64, 2048, 1408)
    assert tensors["blk.26.ffn_down_exps.weight"].quant == tensors["blk.0.ffn_down.weight"].quant == "Q8_0"
    assert tensors["blk.5.ffn_gate_exps.weight"].quant == tensors["blk.5.ffn_down_shexp.weight"].quant == "Q4_K"
    assert "blk.0.ffn_gate_exps.weight" not in tensors


SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "first_k_dense_replace": 1,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.startswith(("tiny", "mid"))])
def test_each_shape_loads_and_computes(shape: str, tmp_path: Path, run_logits: Callable[..., torch.Tensor]) -> None:
    """Small sizes in place of the real ones, but experts, heads of latents and routers as they are."""
    config = SHAPES[shape]
    small = SMALL if "kv_lora_rank" in config else GROUPED
    if "moe_intermediate_size" in config:
        small = {**small, "moe_intermediate_size": 32}
    else:
        small = {**small, "intermediate_size": 32}
    if config.get("rotary_dim"):
        small = {**small, "rotary_dim": 32}
    if config["model_type"] == "mimo_v2_flash":  # whose values are shorter than keys
        small = {**small, "head_dim": 96, "v_head_dim": 64}
    changes = {name: value for name, value in small.items() if name in config}
    layers = 4 if "linear_key_head_dim" in config else 2  # of which at least one has keys and values
    write_synthetic(f"synthetic:{shape}:q4_k_m", tmp_path / "m", layers=layers, changes=changes)
    model = load_model(str(tmp_path / "m"))
    assert model.config.model_type == config["model_type"]
    logits = run_logits(model.module, model.kv_layout(16), [1, 2, 3, 300, 17])
    assert torch.isfinite(logits).all()
    assert 1 < logits.std() < 6


def test_the_sizes_of_real_models_are_theirs() -> None:
    """Weights in billions, as their publishers say."""
    for shape, billions in (
        ("deepseek-v3", 671),
        ("kimi-k2", 1026),
        ("glm-4.6", 353),
        ("minimax-m2", 229),
        ("qwen3-next-80b-a3b", 80),
        ("llama-4-maverick", 400),
        ("mimo-v2-flash", 309),
        ("step-3.5-flash", 196),
    ):
        weights = sum(math.prod(tensor.shape) for tensor in tensors_of(SHAPES[shape], "Q8_0"))
        assert weights / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_vocabulary_fills_the_model() -> None:
    data = build_vocabulary(151936)
    assert len(data.tokens) == len(set(data.tokens)) == len(data.kinds) == 151936


def test_a_shape_alone_is_in_the_mix_of_llama_cpp() -> None:
    alone, mix = open_checkpoint("synthetic:tiny"), open_checkpoint("synthetic:tiny:q4_k_m")
    assert {name: alone.quant(name) for name in alone.names()} == {name: mix.quant(name) for name in mix.names()}


@pytest.mark.parametrize(
    ("name", "says"),
    [("synthetic:huge:q4_0", "unknown shape 'huge'; known: tiny, mid, qwen3-30b-a3b"),
     ("synthetic:tiny:q9_9", "unknown quantisation 'q9_9'; known: q4_k_m, f32")],
)  # fmt: skip
def test_unknown_names_are_refused(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown") as caught:
        write_synthetic(name, tmp_path / "model.gguf")
    assert says in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_model_in_memory_equals_the_written_one(tmp_path: Path) -> None:
    name = "synthetic:tiny:q4_k_m:3"
    write_synthetic(name, tmp_path / "tiny.gguf")
    ours, written = open_checkpoint(name), open_checkpoint(str(tmp_path / "tiny.gguf"))
    assert ours.config() == written.config()
    assert ours.config()["num_hidden_layers"] == 3
    assert sorted(ours.names()) == sorted(written.names())
    for tensor in ours.names():
        assert ours.quant(tensor) == written.quant(tensor)
        assert ours.nbytes(tensor) == written.nbytes(tensor)
        assert torch.equal(ours.decode(tensor, torch.float32), written.decode(tensor, torch.float32)), tensor
    prompt = "the end<|im_end|>"
    assert load_tokenizer(name).encode(prompt) == load_tokenizer(str(tmp_path / "tiny.gguf")).encode(prompt)


@pytest.mark.parametrize("layers", ["0", "x", "-1", "5000"])
def test_layers_of_a_name_are_checked(layers: str) -> None:
    with pytest.raises(CheckpointError, match=r"layers must be a number from 1 to 4096"):
        open_checkpoint(f"synthetic:tiny:q8_0:{layers}")


@pytest.mark.parametrize("layers", [0, -1, 5000])
def test_too_many_layers_are_refused(layers: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"layers must be a number from 1 to 4096, got '{layers}'"):
        write_synthetic("synthetic:tiny:q8_0:2", tmp_path / "model.gguf", layers=layers)
    assert not list(tmp_path.iterdir())
