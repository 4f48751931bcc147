"""Models of random weights in the shape of a real model: `synthetic:SHAPE[:QUANT[:LAYERS]][:routing=FILE]`.

They are for measurements: speed does not depend on the values of weights, so none need to be downloaded. A model is a
checkpoint in memory or one GGUF file. The standard deviations keep the size of activations constant through all layers,
and make router scores and logits neither flat nor certain. With a routing trace, routers choose as it says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import Checkpoint, CheckpointTensor, Progress
from ktqueue.loading.gguf.checkpoint import build_checkpoint
from ktqueue.loading.gguf.families import family_of_model_type
from ktqueue.loading.gguf.metadata import MAX_LAYERS, metadata_from_config
from ktqueue.loading.gguf.vocabulary import TokenKind, VocabularyData, byte_alphabet, to_metadata
from ktqueue.loading.gguf.writer import GgufWriter
from ktqueue.loading.model_path import SYNTHETIC_PREFIX
from ktqueue.loading.quantize import quantize
from ktqueue.loading.synthetic.random_blocks import GROUP, random_blocks
from ktqueue.loading.synthetic.routing import RoutedWeights
from ktqueue.loading.synthetic.shapes import MIX, RESIDUAL_GAINS, SHAPES, SyntheticTensor, tensors_of
from ktqueue.loading.weight_formats import BLOCKS, FOLDER_FORMATS, Bytes

# Blocks per pool; a larger tensor repeats them. Both sizes are prime, so that as many rows of a tensor as there are
# blocks begin at different blocks.
_POOLS = (8191, 262_139)
ROUTING = ":routing="
DISTINCT = 4  # matrices that the experts of a layer share, where they cannot be views of the pool
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = ("t h", "th e", "i n", "a n", "an d", "e r", "r e", "o n", "Ġ the", "Ġ and", "Ġ a", "o u", "in g", "h e")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _ViewTensor(CheckpointTensor):
    """Experts as views into one pool. `data` is the view of the first expert."""

    views: tuple[Bytes, ...] = ()

    def expert_views(self) -> list[Bytes]:
        return list(self.views)


def open_synthetic(name: str) -> Checkpoint:
    """Open the model called `name`, in memory. Raises CheckpointError.

    Its experts share a pool of weights, so a model of any size takes little memory and time. Packed weights take as
    much memory as those of a file.
    """
    config, quant, metadata = _parse(name)
    tensors = list(tensors_of(config, quant))
    pools = _WeightPools()
    routed = _routed(name, config, tensors, pools)
    return build_checkpoint(name, metadata, {tensor.name: pools.tensor_of(tensor, routed) for tensor in tensors})


def synthetic_vocabulary(name: str) -> VocabularyData:
    """Return the vocabulary of the model called `name`. Raises CheckpointError."""
    return build_vocabulary(_parse(name)[0]["vocab_size"])


def write_synthetic(
    name: str,
    target: Path,
    *,
    layers: int | None = None,
    changes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the model called `name` (`synthetic:SHAPE[:QUANT[:LAYERS]][:routing=FILE]`) to `target`.

    QUANT is q4_k_m (llama.cpp's mix, the default) or a storage format such as q8_0 for all matrices; norms and routers
    are f32. `layers` overrides the number in the name, and `changes` fields of the shape's config. The same call writes
    the same bytes. Raises CheckpointError.
    """
    config, quant, metadata = _parse(name, layers, changes)
    if quant in FOLDER_FORMATS:
        raise CheckpointError(f"{name}: GGUF files have no format {quant.lower()}")
    tensors = list(tensors_of(config, quant))
    pools = _WeightPools()
    with GgufWriter(target, metadata["general.architecture"], quant) as writer:
        writer.add_metadata({key: value for key, value in metadata.items() if key != "general.architecture"})
        writer.write_all(tensors, _routed(name, config, tensors, pools) or pools, progress)


def _routed(
    name: str, config: dict[str, Any], tensors: list[SyntheticTensor], pools: "_WeightPools"
) -> RoutedWeights | None:
    """The weights that follow the routing trace of the name; None: it names none."""
    file = name.partition(ROUTING)[2]
    return RoutedWeights(config, tensors, Path(file), pools) if file else None


def _parse(
    name: str, layers: int | None = None, changes: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Return config, quantisation and GGUF metadata of the model called `name`."""
    name, routing, file = name.partition(ROUTING)
    if routing and not file:
        raise CheckpointError(f"{name}{routing} names no file")
    shape, _, rest = name.removeprefix(SYNTHETIC_PREFIX).partition(":")
    quant, _, count = rest.partition(":")
    quant = quant or MIX
    if shape not in SHAPES:
        raise CheckpointError(f"{name}: unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    if quant.upper() not in (MIX, *BLOCKS):
        known = ", ".join((MIX, *BLOCKS)).lower()
        raise CheckpointError(f"{name}: unknown quantisation {quant!r}; known: {known}")
    config = {**SHAPES[shape], **(changes or {})}
    stated = str(layers) if layers is not None else count or str(config["num_hidden_layers"])
    if not (stated.isdecimal() and 1 <= int(stated) <= MAX_LAYERS):
        raise CheckpointError(f"{name}: layers must be a number from 1 to {MAX_LAYERS}, got {stated!r}")
    own = SHAPES[shape]["num_hidden_layers"]
    lists = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == own}  # by layer
    config |= {key: [value[layer % own] for layer in range(int(stated))] for key, value in lists.items()}
    config["num_hidden_layers"] = int(stated)
    family = family_of_model_type(config["model_type"], name)
    metadata = {
        "general.architecture": family.layout.architecture,
        "general.name": f"{name}{routing}{Path(file).name}",
        **metadata_from_config(family, config, name),
        f"{family.layout.architecture}.vocab_size": config["vocab_size"],
        **to_metadata(build_vocabulary(config["vocab_size"])),
    }
    return config, quant.upper(), metadata


def build_vocabulary(size: int) -> VocabularyData:
    """Return bytes, a few merges, three control tokens, and words ` w0`, ` w1` ... that no text is split into."""
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in _MERGES), *_CONTROL]
    ids = {token: len(tokens) - len(_CONTROL) + i for i, token in enumerate(_CONTROL)}
    kinds = [TokenKind.CONTROL if token in ids else TokenKind.NORMAL for token in tokens]
    words = size - len(tokens)
    return VocabularyData(
        model="gpt2",
        pre="qwen2",
        tokens=[*tokens, *(f"Ġw{i}" for i in range(words))],
        kinds=kinds + [TokenKind.NORMAL] * words,
        merges=list(_MERGES),
        ids={"eos": ids["<|endoftext|>"], "pad": ids["<|endoftext|>"], "eot": ids["<|im_end|>"]},
        chat_template=_TEMPLATE,
    )


class _WeightPools:
    """Fills tensors from pools of random blocks. Each tensor begins where the previous one of its kind ended."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, float, int], Bytes] = {}  # [blocks, bytes of a block]
        self._next: dict[tuple[str, float, int], int] = {}
        self._wrapped: dict[tuple[int, int], Bytes] = {}  # pools, followed by the blocks of one expert from their start

    def __call__(self, tensor: SyntheticTensor) -> Bytes:
        random = np.random.default_rng(list(tensor.name.encode()))
        if len(tensor.shape) == 1 or tensor.name.endswith(".bias"):
            values = tensor.mean + tensor.deviation * random.standard_normal((1, int(np.prod(tensor.shape))))
            return quantize(values.astype(np.float32), "F32").reshape(-1)
        pool, start, count = self._take(tensor, random)
        return _cut(pool, start, count)

    def tensor_of(self, tensor: SyntheticTensor, routed: RoutedWeights | None = None) -> CheckpointTensor:
        """Return the weights of a call as a tensor. Experts are views that share their memory."""
        if len(tensor.shape) < 3 or tensor.name.endswith(".bias"):
            return CheckpointTensor(tensor.name, tensor.quant, tensor.shape, (routed or self)(tensor))
        pool, start, count = self._take(tensor, np.random.default_rng(list(tensor.name.encode())))
        experts = tensor.shape[0]
        expert_blocks = count // experts
        key = (id(pool), expert_blocks)
        if key not in self._wrapped:
            self._wrapped[key] = _cut(pool, 0, len(pool) + expert_blocks).reshape(-1, pool.shape[1])
        wrapped = self._wrapped[key]
        starts = ((start + expert * expert_blocks) % len(pool) for expert in range(experts))
        views = tuple(wrapped[first : first + expert_blocks].reshape(-1) for first in starts)
        if routed is not None and tensor.role in RESIDUAL_GAINS:
            one = replace(tensor, shape=tensor.shape[1:])
            cleared = [routed.without_track(one, view) for view in views[:DISTINCT]]
            views = tuple(cleared[expert % len(cleared)] for expert in range(experts))
        return _ViewTensor(tensor.name, tensor.quant, tensor.shape, views[0], views=views)

    def _take(self, tensor: SyntheticTensor, random: np.random.Generator) -> tuple[Bytes, int, int]:
        """Return the pool of a matrix, its first block and its number of blocks."""
        count = int(np.prod(tensor.shape)) // max(BLOCKS[tensor.quant][0], GROUP)
        size = next((size for size in _POOLS if count <= 8 * size), _POOLS[-1])
        key = (tensor.quant, tensor.deviation, size)
        if key not in self._pools:
            self._pools[key] = random_blocks(tensor.quant, size, tensor.deviation, random)
        start = self._next.get(key, 0)
        self._next[key] = (start + count) % size
        return self._pools[key], start, count


def _cut(pool: Bytes, start: int, count: int) -> Bytes:
    """Return `count` blocks of the pool from `start`, starting again at its end."""
    out = np.empty((count, pool.shape[1]), np.uint8)
    done = 0
    while done < count:
        step = min(count - done, len(pool) - start)
        out[done : done + step] = pool[start : start + step]
        done, start = done + step, 0
    return out.reshape(-1)
