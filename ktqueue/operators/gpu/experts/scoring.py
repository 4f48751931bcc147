"""How a router's logits become the experts of a token, where that is more than the highest softmax: DeepSeek's routers.

The torch part, before the kernel of fused.route takes the best and weighs them. Capturable. Knows no model.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """`sigmoid`: an expert's score is the sigmoid of its logit, and `bias` [experts] float32 is added for the choice
    alone; else the softmax of all. `scale`: of the weights in the end. Only experts of the best `groups_used` of
    `groups` are taken: a group's score is its best expert's, with sigmoids the sum of its best two."""

    sigmoid: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    bias: torch.Tensor | None = None

    def choice(self, logits: torch.Tensor) -> torch.Tensor | None:
        """logits [tokens, experts] -> by what experts are taken, highest first, of the same shape; None: by them."""
        grouped = self.groups_used < self.groups
        if not grouped and self.bias is None:
            return None
        by = logits.float()
        if self.sigmoid:
            by = by.sigmoid()
        if self.bias is not None:
            by = by + self.bias
        if not grouped:
            return by
        each = by.view(len(by), self.groups, -1)
        best = each.topk(2, -1).values.sum(-1) if self.sigmoid else each.amax(-1)
        taken = best.topk(self.groups_used, -1).indices
        left = torch.ones_like(best, dtype=torch.bool).scatter_(1, taken, False)
        return each.masked_fill(left[:, :, None], float("-inf")).flatten(1)


PLAIN = Scoring()
"""The highest softmax."""
