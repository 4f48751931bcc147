"""The indexer of sparse attention (DeepSeek-V3.2, GLM-5), which chooses the keys that each token attends to.

A light attention of its own scores all earlier tokens: its keys are in the cache beside the latents. A token attends to
the latents of the `chosen` best, so that long contexts cost little more than short ones. Where a token sees no more
keys than are chosen, it attends to all. Nothing waits for the device. Knows no file.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch.nn import functional

from ktqueue.operators.gpu.attention.index_scores import index_scores
from ktqueue.operators.gpu.dense import DenseWeights
from ktqueue.operators.latent_shape import INDEX_NORM_EPSILON, IndexerShape, rotate
from ktqueue.operators.step import StepContext

Linear = Callable[[torch.Tensor], torch.Tensor]
"""A matrix: [tokens, columns] -> [tokens, rows]."""
_BYTES_AT_ONCE = 256 << 20
_SCORE_BYTES = 16  # of a key, with what sorting needs


@dataclass(frozen=True, slots=True)
class Indexer:
    """The indexer of one layer.

    query: from the low-rank query, to all heads; key: from the layer's input; weights: from the same to a factor for
    each head, float32; norm_weight, norm_bias: of the LayerNorm of keys, [key].
    """

    shape: IndexerShape
    query: Linear
    key: Linear
    weights: Linear
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor

    def choose(
        self,
        layer: int,
        x: torch.Tensor,
        low_rank: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        step: StepContext,
    ) -> torch.Tensor | None:
        """Write the step's keys to the cache, then choose keys for each token.

        x [tokens, hidden]: the layer's input; low_rank [tokens, rank]: the normalised low-rank query; cosine, sine
        [tokens, rotary / 2]. Returns positions in the token's sequence [tokens, chosen] int64, -1 where there is none.
        None: all tokens attend to all keys.
        """
        shape = self.shape
        key = functional.layer_norm(self.key(x), (shape.key,), self.norm_weight, self.norm_bias, INDEX_NORM_EPSILON)
        key = self._rotated(key, cosine, sine)
        step.kv.write_index_keys(layer, step.slot_mapping, key)
        if not has_choice(step, shape.chosen):
            return None
        query = self._rotated(self.query(low_rank).view(len(x), shape.heads, shape.key), cosine[:, None], sine[:, None])
        weights = self.weights(x) * (shape.heads * shape.key) ** -0.5
        keys = step.kv.index_keys[layer]
        choice = torch.full((len(x), shape.chosen), -1, dtype=torch.int64, device=x.device)
        for tokens, pages, seen in _parts(step, shape.chosen, _SCORE_BYTES, 0):
            scores = index_scores(query[tokens], weights[tokens], keys, pages, seen)
            values, indices = _best(scores, min(shape.chosen, scores.shape[1]))
            # In the order of positions, so that sums over them do not depend on the last bits of scores.
            found = indices.masked_fill(values == -torch.inf, -1).sort(dim=-1).values
            choice[tokens, : found.shape[1]] = found
        return choice

    @classmethod
    def load(
        cls,
        shape: IndexerShape,
        weights: DenseWeights,
        module: str,
        linear: Callable[[str], Linear],
        factors: Callable[[str], Linear] | None = None,
    ) -> Self:
        """Read the indexer of that name. linear: makes the matrix of a linear module, by its name; factors: the same
        for the one whose results stay float32; None: it is decoded. Raises ValueError if the weights do not fit.
        """
        name = f"{module}.weights_proj"
        return cls(
            shape,
            linear(f"{module}.wq_b"),
            linear(f"{module}.wk"),
            factors(name) if factors else partial(weights.linear(name), dtype=torch.float32),
            weights.vector(f"{module}.k_norm.weight"),
            weights.vector(f"{module}.k_norm.bias"),
        )

    def _rotated(self, states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Rotate the first columns of states [..., key]."""
        rotary = 2 * cosine.shape[-1]
        turned = rotate(states[..., :rotary], cosine, sine, interleaved=self.shape.interleaved)
        return torch.cat([turned, states[..., rotary:]], -1)


@dataclass(slots=True)
class KeyChoice:
    """What Indexer.choose returned last in a step. Layers without an indexer attend to the same positions."""

    positions: torch.Tensor | None = None


def has_choice(step: StepContext, chosen: int) -> bool:
    """Whether a token of the step may see more keys than `chosen`. On a GPU, where nothing waits for lengths, the
    answer is for the longest sequence that the page table can hold."""
    if step.context_lengths.device.type == "cpu" and step.attention is None:
        return bool(step.context_lengths.max() > chosen)
    return step.page_table.shape[1] * step.kv.layout.page_size > chosen


def attend_to_choice(
    layer: int, query: torch.Tensor, choice: torch.Tensor, out: torch.Tensor, step: StepContext, scaling: float
) -> None:
    """Attend to chosen latents, for every token that sees more keys than are chosen; on a GPU, for every token.

    query [tokens, heads, latent + rotary]; choice [tokens, chosen]: see Indexer.choose; out [tokens, heads, latent].
    """
    keys, page_size, scale = step.kv.keys[layer], step.kv.layout.page_size, step.kv.layout.scale(layer)
    cache, latent, count = keys.flatten(0, 2), out.shape[-1], choice.shape[1]
    for tokens, pages, _ in _parts(step, count, 0, 4 * count * (query.shape[-1] + 2 * query.shape[1])):
        chosen = choice[tokens]
        hidden = chosen < 0
        chosen = chosen.clamp(min=0)
        slots = pages.gather(1, chosen // page_size) * page_size + chosen % page_size
        found = _gathered(cache, slots).to(query.dtype)  # [tokens, chosen, latent + rotary]
        scores = torch.bmm(query[tokens], found.transpose(1, 2)).float() * (scaling * scale.key)
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        weights = scores.softmax(-1).to(query.dtype)
        out[tokens] = torch.bmm(weights, found[..., :latent]) * scale.value


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best of scores [tokens, keys] and their places, [tokens, count] each; on a CPU the first of equal
    ones, elsewhere those that torch.topk takes."""
    if scores.device.type == "cpu":
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], indices[:, :count]
    values, indices = scores.topk(count, dim=-1, sorted=False)
    return values, indices


def _gathered(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """cache[slots], also of float8, which torch does not index on every device."""
    if cache.dtype.itemsize > 1:
        return cache[slots]
    return cache.view(torch.uint8)[slots].view(cache.dtype)


def _parts(
    step: StepContext, chosen: int, key_bytes: int, token_bytes: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield the step's tokens in parts, with the pages of each token [tokens, n] int32 and the keys it sees [tokens].

    key_bytes, token_bytes: what a token needs for each key of its pages, and once. On a CPU only tokens that see more
    keys than `chosen` are yielded, each alone with its own pages, so that it is computed alike in every batch.
    """
    starts, contexts, table = step.query_starts, step.context_lengths, step.page_table
    page_size = step.kv.layout.page_size
    if contexts.device.type == "cpu" and step.attention is None:
        for row, context in enumerate(contexts.tolist()):
            begin, end = int(starts[row]), int(starts[row + 1])
            for token in range(max(begin, end - (context - chosen)), end):
                seen = context - (end - 1 - token)
                pages = table[row : row + 1, : -(-seen // page_size)]
                yield slice(token, token + 1), pages, torch.tensor([seen])
        return
    tokens = torch.arange(len(step.slot_mapping), dtype=starts.dtype, device=starts.device)
    row_of = torch.searchsorted(starts[1:], tokens, right=True)
    seen = contexts[row_of] - (starts[1:][row_of] - 1 - tokens)
    size = max(1, _BYTES_AT_ONCE // (table.shape[1] * page_size * key_bytes + token_bytes))
    for first in range(0, len(tokens), size):
        part = slice(first, min(first + size, len(tokens)))
        yield part, table[row_of[part]].contiguous(), seen[part]
