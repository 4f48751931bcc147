"""The sampler on a device, with the same filters, noise and tokens as engine/sampler.py.

Every function is a chain of torch calls that never waits for the device, and whose memory accesses are safe for logits
that are not finite. Sums of weights are float64, while the host sums blocks of 64 weights in float32, and exp may
differ in the last bit between a device and numpy. So a draw that is very close to the border between two tokens (about
1e-7 of the total weight) may choose the other one. Everything else is equal.

No row is sorted as a whole: rows with top_k or top_p look at their `candidates` most likely tokens, and report if
these do not suffice.
"""

from dataclasses import dataclass

import torch

from ktqueue.operators.gpu.kernels.candidates import Filters, below, draw_from_candidates, without

CANDIDATES = 1024
_BLOCK = 64  # columns summed at a time, as the host does


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Parameters of rows on the device, each [rows], named as in sampler.SamplingRows.

    `inverse_temperature`, `min_p`: float32. `top_k`: int64, 0 for none. `top_p`, `noise`: float64.
    """

    inverse_temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    noise: torch.Tensor

    def row(self, row: int) -> "DrawnRows":
        """The parameters of one row, each [1]."""
        numbers = self.inverse_temperature, self.top_k, self.top_p, self.min_p, self.noise
        return DrawnRows(*(number[row : row + 1] for number in numbers))


def weigh(logits: torch.Tensor, rows: DrawnRows) -> torch.Tensor:
    """Weights [rows, vocab] float32, with 1 for the most likely token of each row. `logits` is not changed."""
    weights = logits - logits.amax(dim=1, keepdim=True)
    return weights.mul_(rows.inverse_temperature[:, None]).exp_()


def draw_from_all(weights: torch.Tensor, rows: DrawnRows) -> torch.Tensor:
    """Draw from whole rows, filtered by min_p only. Returns [rows] int64."""
    count, vocab = weights.shape
    weights = without(weights, rows.min_p)
    padded = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK)).view(count, -1, _BLOCK)
    blocks = padded.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    target = below(rows.noise * blocks[:, -1], blocks[:, -1])
    block = (blocks <= target[:, None]).sum(dim=1, keepdim=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_(min=0)), 0.0)[:, 0]
    inner = padded.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(dim=1)
    target = below(target - before, inner[:, -1])
    found = block[:, 0] * _BLOCK + (inner <= target[:, None]).sum(dim=1)
    return found.clamp_(max=vocab - 1)


def draw_from_few(
    weights: torch.Tensor, rows: DrawnRows, candidates: int = CANDIDATES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from rows with top_k or top_p, looking at the `candidates` most likely tokens of each.

    Returns the tokens, [rows] int64, and whether the candidates sufficed, [rows] bool. Where they did not, the token
    has no meaning. The whole vocabulary always suffices.
    """
    values, ids = weights.topk(min(candidates, weights.shape[1]), dim=1)
    return draw_from_candidates(values, ids, weights, Filters(rows.top_k, rows.top_p, rows.min_p, rows.noise))
