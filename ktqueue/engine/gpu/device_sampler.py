"""The sampler's choices on a device: the same filters, the same noise, the same tokens as engine/sampler.py.

Every function is a chain of torch calls without a wait for the device and without memory access that depends on a
logit being finite. Sums over weights are float64. The host adds blocks of 64 weights up in float32, and exp may differ
in its last bit between a device and numpy: a draw that lands within such a rounding (about 1e-7 of the total weight) of
the border between two tokens may fall to the other side; everything else is equal.

No row is ever sorted whole: rows with top_k or top_p look at their likeliest `candidates` tokens, and say where these
do not suffice.
"""

from dataclasses import dataclass

import torch

CANDIDATES = 1024
_BLOCK = 64  # columns summed at a time, as the host does


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Parameters of rows on the device, each [rows]; meanings as in sampler.SamplingRows.

    `inverse_temperature`, `min_p`: float32. `top_k`: int64, 0 for rows without. `top_p`, `noise`: float64.
    """

    inverse_temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    noise: torch.Tensor


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Likeliest token of each row of `logits` [rows, vocab] as int64, and which rows have a finite one as bool."""
    chosen = logits.argmax(dim=1)
    return chosen, logits.gather(1, chosen[:, None])[:, 0].isfinite()


def weigh(logits: torch.Tensor, rows: DrawnRows) -> torch.Tensor:
    """[rows, vocab] float32: 1 for the likeliest token of each row. `logits` is left as it is."""
    weights = logits - logits.amax(dim=1, keepdim=True)
    return weights.mul_(rows.inverse_temperature[:, None]).exp_()


def draw_from_all(weights: torch.Tensor, rows: DrawnRows) -> torch.Tensor:
    """Draw from whole rows; only min_p filters. [rows] int64."""
    count, vocab = weights.shape
    weights = _without(weights, rows.min_p)
    padded = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK)).view(count, -1, _BLOCK)
    blocks = padded.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    target = _below(rows.noise * blocks[:, -1], blocks[:, -1])
    block = (blocks <= target[:, None]).sum(dim=1, keepdim=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_(min=0)), 0.0)[:, 0]
    inner = padded.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(dim=1)
    target = _below(target - before, inner[:, -1])
    found = block[:, 0] * _BLOCK + (inner <= target[:, None]).sum(dim=1)
    return found.clamp_(max=vocab - 1)


def draw_from_few(
    weights: torch.Tensor, rows: DrawnRows, candidates: int = CANDIDATES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from rows with top_k or top_p, looking at the `candidates` likeliest tokens of each.

    The token of each row, [rows] int64, and whether the candidates sufficed, [rows] bool; where they did not the token
    means nothing. As many candidates as the vocabulary has always do.
    """
    vocab = weights.shape[1]
    candidates = min(candidates, vocab)
    values, ids = weights.topk(candidates, dim=1)
    least = values[:, -1]
    limited = (rows.top_k > 0) & (rows.top_k < vocab)
    kth = values.gather(1, (rows.top_k - 1).clamp_(0, candidates - 1)[:, None])[:, 0]
    floor = torch.where(limited, torch.maximum(rows.min_p, kth), rows.min_p)
    kept = _without(values, floor).double()  # greatest first, zeros at the end
    cumulative = kept.cumsum(dim=1)
    everywhere = _without(weights, floor).sum(dim=1, dtype=torch.float64)
    wanted = rows.top_p * torch.where(limited, cumulative[:, -1], everywhere)
    last = (cumulative < wanted[:, None]).sum(dim=1, keepdim=True).clamp_(max=candidates - 1)
    cut = torch.where(rows.top_p < 1.0, kept.gather(1, last)[:, 0], 0.0)  # of the first with which top_p is reached
    kept = torch.where(kept >= cut[:, None], kept, 0.0)
    # A token beyond the candidates is not kept if it has no weight, or less than what is kept.
    bound = torch.maximum(floor.double(), cut)
    enough = (least <= 0.0) | ((least < bound) & ~(limited & (rows.top_k > candidates)))
    order = ids.argsort(dim=1)  # the draw goes through the tokens in vocabulary order
    cumulative = kept.gather(1, order).cumsum(dim=1)
    target = _below(rows.noise * cumulative[:, -1], cumulative[:, -1])
    place = (cumulative <= target[:, None]).sum(dim=1, keepdim=True).clamp_(max=candidates - 1)
    return ids.gather(1, order.gather(1, place))[:, 0], enough | (candidates == vocab)


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] float64: the logarithm of the softmax of each row."""
    wide = logits.double()
    wide -= wide.amax(dim=1, keepdim=True)
    return wide.sub_(wide.exp().sum(dim=1, keepdim=True).log_())


def _without(weights: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """The weights of at least the row's floor, else 0."""
    return torch.where(weights >= floor[:, None], weights, 0.0)


def _below(target: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """The target, less than the end though the product that made it rounds up."""
    return torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
