"""Models of random weights in a real model's shape, for measuring: `synthetic:SHAPE:QUANT[:LAYERS]`, as a checkpoint
in memory or as one GGUF file.

Speed does not depend on what weights say, so none need be had from anywhere. Standard deviations are such that
activations keep their size through all layers, router and logits are neither flat nor certain.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.families import family_of_model_type, metadata_from_config
from ktqueue.loading.gguf_checkpoint import MAX_LAYERS, assemble
from ktqueue.loading.gguf_file import TOKEN_CONTROL, TOKEN_NORMAL, Writer, quantize
from ktqueue.loading.quants import BLOCKS, Bytes
from ktqueue.loading.random_blocks import GROUP, random_blocks
from ktqueue.loading.stored import StoredCheckpoint, StoredTensor
from ktqueue.loading.vocabulary_data import VocabularyData, byte_alphabet, to_metadata

PREFIX = "synthetic:"
Progress = Callable[[int, int, str], None]  # as convert's

# Transformers configs, by the names of the models whose shapes they are; `tiny` and `mid` are ours, for tests.
_QWEN3 = {"model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_QWEN3, "hidden_size": 256, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 512,
    },
    "mid": {
        **_QWEN3, "hidden_size": 1024, "num_hidden_layers": 8, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 8192,
    },
    "qwen3-30b-a3b": {
        **_QWEN3, "hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768,
        "hidden_size": 4096, "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 32000,
    },
}  # fmt: skip
MIX = "Q4_K_M"  # llama.cpp's mix of Q4_K and Q6_K; any other quantisation is one format for all matrices

# Blocks that are drawn of one kind; a larger tensor repeats them. Both are prime, so that as many rows of a tensor as
# there are blocks begin at different ones.
_POOLS = (8191, 262_139)
_ROUTER_GAIN, _HEAD_GAIN = 2.0, 3.0
_ATTENTION_GAIN, _DOWN_GAIN = 2.0, 4.0  # of what layers add to the residual, together about as much as it was

_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = ("t h", "th e", "i n", "a n", "an d", "e r", "r e", "o n", "Ġ the", "Ġ and", "Ġ a", "o u", "in g", "h e")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to write; `deviation` of its weights."""

    name: str
    quant: str
    shape: tuple[int, ...]
    deviation: float


@dataclass(frozen=True, slots=True)
class _Views(StoredTensor):
    """Experts that are views into one pool: `data` is that of the first."""

    views: tuple[Bytes, ...] = ()

    def matrices(self) -> list[Bytes]:
        return list(self.views)


def open_synthetic(name: str) -> StoredCheckpoint:
    """The model that `name` stands for, in memory. Its experts share a pool of weights, so that it takes little memory
    and time however large it is; whoever packs them takes what a file of that size would. Raises CheckpointError."""
    config, quant, metadata = _model(name)
    draw = _Draw()
    return assemble(name, metadata, {tensor.name: draw.stored(tensor) for tensor in _tensors(config, quant)})


def synthetic_vocabulary(name: str) -> VocabularyData:
    """The vocabulary of the model that `name` stands for. Raises CheckpointError."""
    return vocabulary(_model(name)[0]["vocab_size"])


def write(name: str, target: Path, *, layers: int | None = None, progress: Progress | None = None) -> None:
    """Write the model that `name` (`synthetic:SHAPE:QUANT[:LAYERS]`) stands for as `target`.

    QUANT is q4_k_m (llama.cpp's mix) or a storage format, such as q8_0, for all matrices; norms and routers are f32.
    `layers` overrides the name's. The same call writes the same bytes. Raises CheckpointError.
    """
    config, quant, metadata = _model(name, layers)
    tensors = list(_tensors(config, quant))
    draw = _Draw()
    with Writer(target, metadata["general.architecture"], quant) as writer:
        writer.add_metadata({key: value for key, value in metadata.items() if key != "general.architecture"})
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.quant, tensor.shape)
        writer.start()
        for done, tensor in enumerate(tensors):
            if progress:
                progress(done, len(tensors), tensor.name)
            writer.write(draw(tensor))
    if progress:
        progress(len(tensors), len(tensors), "")


def _model(name: str, layers: int | None = None) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Config, quantisation and GGUF metadata of the model that `name` stands for."""
    shape, _, rest = name.removeprefix(PREFIX).partition(":")
    quant, _, count = rest.partition(":")
    if shape not in SHAPES:
        raise CheckpointError(f"{name}: there is no shape {shape!r}; known: {', '.join(SHAPES)}")
    if quant.upper() not in (MIX, *BLOCKS):
        known = ", ".join((MIX, *BLOCKS)).lower()
        raise CheckpointError(f"{name}: there is no quantisation {quant!r}; known: {known}")
    if count and not (count.isdecimal() and 1 <= int(count) <= MAX_LAYERS):
        raise CheckpointError(f"{name}: layers must be a number from 1 to {MAX_LAYERS}, got {count!r}")
    config = dict(SHAPES[shape])
    config["num_hidden_layers"] = layers or int(count or config["num_hidden_layers"])
    family = family_of_model_type(config["model_type"], name)
    metadata = {
        "general.architecture": family.architecture,
        "general.name": name,
        **metadata_from_config(family, config, name),
        f"{family.architecture}.vocab_size": config["vocab_size"],
        **to_metadata(vocabulary(config["vocab_size"])),
    }
    return config, quant.upper(), metadata


def vocabulary(size: int) -> VocabularyData:
    """Bytes, a few merges, three control tokens, then words ` w0`, ` w1` and so on that no text is split into."""
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in _MERGES), *_CONTROL]
    ids = {token: len(tokens) - len(_CONTROL) + i for i, token in enumerate(_CONTROL)}
    kinds = [TOKEN_CONTROL if token in ids else TOKEN_NORMAL for token in tokens]
    words = size - len(tokens)
    return VocabularyData(
        model="gpt2",
        pre="qwen2",
        tokens=[*tokens, *(f"Ġw{i}" for i in range(words))],
        kinds=kinds + [TOKEN_NORMAL] * words,
        merges=list(_MERGES),
        ids={"eos": ids["<|endoftext|>"], "pad": ids["<|endoftext|>"], "eot": ids["<|im_end|>"]},
        chat_template=_TEMPLATE,
    )


def _tensors(config: dict[str, Any], quant: str) -> Iterator[_Tensor]:
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    experts = config.get("num_experts") or config["num_local_experts"]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    share = (2 * layers) ** -0.5
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))

    def norm(name: str, size: int) -> _Tensor:
        return _Tensor(f"{name}.weight", "F32", (size,), 0.1)

    def matrix(name: str, *shape: int, layer: int = 0, gain: float = 1.0) -> _Tensor:
        chosen = _choose(quant, name.rpartition(".")[2], layer, layers)
        fits = shape[-1] % BLOCKS[chosen][0] == 0
        return _Tensor(f"{name}.weight", chosen if fits else "F16", shape, gain / shape[-1] ** 0.5)

    yield matrix("token_embd", vocab, hidden, gain=hidden**0.5)
    for i in range(layers):
        at = f"blk.{i}"
        yield norm(f"{at}.attn_norm", hidden)
        yield matrix(f"{at}.attn_q", queries, hidden, layer=i)
        yield matrix(f"{at}.attn_k", keys, hidden, layer=i)
        yield matrix(f"{at}.attn_v", keys, hidden, layer=i)
        yield matrix(f"{at}.attn_output", hidden, queries, layer=i, gain=_ATTENTION_GAIN * share)
        if config["model_type"] == "qwen3_moe":
            yield norm(f"{at}.attn_q_norm", config["head_dim"])
            yield norm(f"{at}.attn_k_norm", config["head_dim"])
        yield norm(f"{at}.ffn_norm", hidden)
        yield _Tensor(f"{at}.ffn_gate_inp.weight", "F32", (experts, hidden), _ROUTER_GAIN / hidden**0.5)
        yield matrix(f"{at}.ffn_gate_exps", experts, width, hidden, layer=i)
        yield matrix(f"{at}.ffn_up_exps", experts, width, hidden, layer=i)
        yield matrix(f"{at}.ffn_down_exps", experts, hidden, width, layer=i, gain=_DOWN_GAIN * share)
    yield norm("output_norm", hidden)
    yield matrix("output", vocab, hidden, gain=_HEAD_GAIN)


def _choose(quant: str, role: str, layer: int, layers: int) -> str:
    """The format of a matrix. Of the mix: Q6_K for the logits, and for values and down in the first and last eighth
    of the layers and every third between, as llama.cpp chooses them."""
    if quant != MIX:
        return quant
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if role == "output" or (more and role in ("attn_v", "ffn_down_exps")) else "Q4_K"


class _Draw:
    """Fills tensors, each from where the one before left the pool of its kind."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, float, int], Bytes] = {}  # [blocks, bytes of a block]
        self._next: dict[tuple[str, float, int], int] = {}
        self._wrapped: dict[tuple[int, int], Bytes] = {}  # pools that go on from their start by one expert's blocks

    def __call__(self, tensor: _Tensor) -> Bytes:
        random = np.random.default_rng(list(tensor.name.encode()))
        if len(tensor.shape) == 1:
            values = 1 + tensor.deviation * random.standard_normal((1, *tensor.shape))
            return quantize(values.astype(np.float32), "F32").reshape(-1)
        pool, start, count = self._take(tensor, random)
        return _cut(pool, start, count)

    def stored(self, tensor: _Tensor) -> StoredTensor:
        """The same weights as of a call; of experts views, which share their memory."""
        if len(tensor.shape) < 3:
            return StoredTensor(tensor.name, tensor.quant, tensor.shape, self(tensor))
        pool, start, count = self._take(tensor, np.random.default_rng(list(tensor.name.encode())))
        experts = tensor.shape[0]
        each = count // experts
        key = (id(pool), each)
        if key not in self._wrapped:
            self._wrapped[key] = _cut(pool, 0, len(pool) + each).reshape(-1, pool.shape[1])
        whole = self._wrapped[key]
        starts = ((start + expert * each) % len(pool) for expert in range(experts))
        views = tuple(whole[at : at + each].reshape(-1) for at in starts)
        return _Views(tensor.name, tensor.quant, tensor.shape, views[0], views=views)

    def _take(self, tensor: _Tensor, random: np.random.Generator) -> tuple[Bytes, int, int]:
        """The pool of a matrix, its first block and the number of its blocks."""
        count = int(np.prod(tensor.shape)) // max(BLOCKS[tensor.quant][0], GROUP)
        size = next((size for size in _POOLS if count <= 8 * size), _POOLS[-1])
        key = (tensor.quant, tensor.deviation, size)
        if key not in self._pools:
            self._pools[key] = random_blocks(tensor.quant, size, tensor.deviation, random)
        start = self._next.get(key, 0)
        self._next[key] = (start + count) % size
        return self._pools[key], start, count


def _cut(pool: Bytes, start: int, count: int) -> Bytes:
    """`count` blocks of the pool from `start` on, over and over."""
    out = np.empty((count, pool.shape[1]), np.uint8)
    done = 0
    while done < count:
        step = min(count - done, len(pool) - start)
        out[done : done + step] = pool[start : start + step]
        done, start = done + step, 0
    return out.reshape(-1)
