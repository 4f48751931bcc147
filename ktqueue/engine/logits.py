"""The logits of a step: in memory, or computed for some rows at a time. Knows nothing of models or of sequences."""

from collections.abc import Callable
from typing import Protocol

import torch


class Logits(Protocol):
    """Logits of the scored tokens of a step, [scored, vocab] float32: a tensor, or LogitsInParts."""

    @property
    def shape(self) -> torch.Size:
        """[scored, vocab]."""

    def __getitem__(self, rows: torch.Tensor | slice, /) -> torch.Tensor:
        """The logits of these rows."""


class LogitsInParts:
    """Logits that are computed when they are asked for, so that no memory holds those of all rows at once.

    x: [scored, hidden], the input of the head, which must not change. head: x of some rows -> [rows, vocab] float32.
    """

    def __init__(self, x: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], vocab: int) -> None:
        self.shape = torch.Size((len(x), vocab))
        self._x = x
        self._head = head

    def __getitem__(self, rows: torch.Tensor | slice, /) -> torch.Tensor:
        with torch.inference_mode():
            return self._head(self._x[rows])
