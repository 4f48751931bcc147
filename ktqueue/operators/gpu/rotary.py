"""Rotary tables on a GPU."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotary:
    """[positions, rotary / 2] float32 each, of all columns of a head that are turned."""

    cosine: torch.Tensor
    sine: torch.Tensor
