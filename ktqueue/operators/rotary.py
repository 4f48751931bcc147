"""Rotary modules of transformers: which angles they give, and their tables.

**Longrope** has two lists of divisors. transformers uses the long one if any position of a forward call is beyond the
model's original length, so a row's angles depend on other rows. Here each sequence has angles of its own: positions of
sequences that use the long list begin at the original length, as if they followed all positions of the short one. See
docs/adr/0047. Phi-3.5-MoE's scales follow the lists, as in Microsoft's modeling_phimoe.py (short_mscale, long_mscale),
whose long list transformers 5.17 never uses.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ktqueue.operators.latent_shape import GROWTH

_LENGTH = "original_max_position_embeddings"


def original_length(config: Any) -> int:
    """Return the number of tokens up to which sequences have other angles than longer ones; 0: the angles of a position
    are always the same.

    Type `dynamic` changes them beyond max_position_embeddings, which no sequence exceeds. Raises ValueError if the
    number depends on the kind of the layer, or if positions have another meaning too.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [rope for rope in parameters.values() if isinstance(rope, Mapping)] or [parameters]
    lengths = {int(rope[_LENGTH]) for rope in kinds if _has_two_lists(rope)}
    if len(lengths) > 1:
        raise ValueError(f"its layers have different {_LENGTH}: {sorted(lengths)}")
    if lengths and (any(rope.get(GROWTH) for rope in kinds) or getattr(config, "attn_temperature_tuning", False)):
        raise ValueError("longrope and queries that grow with their position are not computed together")
    return next((length for length in lengths if length < config.max_position_embeddings), 0)


def _has_two_lists(rope: Mapping[str, Any]) -> bool:
    """For a GGUF file with one list (loading/gguf/rope.py) both are equal."""
    differ = any(rope.get(f"short_{kind}") != rope.get(f"long_{kind}") for kind in ("factor", "mscale"))
    return differ and rope.get("rope_type") not in (None, "default")


class RotaryByLength(nn.Module):
    """A rotary module of longrope, called like it. Positions from `original` on are those of sequences that use the
    long list, plus `original`."""

    def __init__(self, rotary: Any, original: int) -> None:
        super().__init__()
        self.rotary: Any = rotary
        self.original = original

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Return what the module returns for `position_ids` [1, tokens]: a tensor or two, [1, tokens, any]."""
        is_long = position_ids >= self.original
        short = self._angles(0, x, position_ids.where(~is_long, 0), *arguments, **options)
        long = self._angles(self.original, x, (position_ids - self.original).clamp(0), *arguments, **options)
        if isinstance(short, torch.Tensor):
            return torch.where(is_long[..., None], long, short)
        return tuple(torch.where(is_long[..., None], *pair) for pair in zip(long, short, strict=True))

    def _angles(self, last: int, x: torch.Tensor, position_ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Call the module with one more position, `last`, which decides between the lists."""
        if hasattr(self.rotary, "rope_init_fn"):  # Phi-3.5-MoE: transformers 5 does not tell it the length
            self.rotary.rope_init_fn = partial(self.rotary.rope_init_fn, seq_len=last + 1)
        angles = self.rotary(x, torch.nn.functional.pad(position_ids, (0, 1), value=last), *arguments, **options)
        return angles[:, :-1] if isinstance(angles, torch.Tensor) else tuple(part[:, :-1] for part in angles)


def rotary_by_length(rotary: nn.Module) -> nn.Module:
    """Return the rotary module, as a RotaryByLength if its angles depend on the length of a sequence."""
    original = 0 if isinstance(rotary, RotaryByLength) else original_length(rotary.config)
    return RotaryByLength(rotary, original) if original else rotary


def separate_lengths(model: nn.Module) -> None:
    """Replace the rotary modules of `model` whose angles depend on the longest sequence of a forward call."""
    for name, module in [*model.named_modules()]:
        if hasattr(module, "rope_type") and (separate := rotary_by_length(module)) is not module:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, separate)


def rotary_kinds(rotary: nn.Module) -> tuple[str, ...]:
    """Return the kinds of layers for which a rotary module of transformers has angles of their own."""
    rope_type: Any = _own(rotary).rope_type
    return () if isinstance(rope_type, str) else tuple(rope_type)


def rotary_pairs(rotary: nn.Module, kinds: tuple[str, ...]) -> tuple[int, ...]:
    """Return how many pairs of columns of a head a rotary module of transformers rotates, for each of its tables."""
    module = _own(rotary)
    frequencies = [getattr(module, f"{kind}_inv_freq") for kind in kinds] or [module.inv_freq]
    return tuple(int(table.numel()) for table in frequencies)


def _own(rotary: Any) -> Any:
    """Return transformers' module."""
    return rotary.rotary if isinstance(rotary, RotaryByLength) else rotary


def rotary_tables(rotary: nn.Module, positions: int, kinds: tuple[str, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, [tables, positions, pairs] float32 each, from a rotary module of transformers on the
    CPU. If angles depend on the length of a sequence, its original length comes on top of `positions`.

    kinds: of layers, each of which has a table; empty: all layers have the same. A table with fewer pairs than another
    ends with zeros. Most modules return every number twice, for both elements of its pair; gpt-oss's does not.
    """
    rotary = rotary_by_length(rotary)
    widths = rotary_pairs(rotary, kinds)
    cosines, sines = [], []
    for pairs, arguments in zip(widths, [[kind] for kind in kinds] or [[]], strict=True):
        with torch.no_grad():
            places = torch.arange(positions + (rotary.original if isinstance(rotary, RotaryByLength) else 0))[None]
            if hasattr(rotary, "mrope_section"):  # a position in time, height and width, which are equal for text
                places = places.expand(3, 1, -1)
            angles = rotary(torch.empty(0), places, *arguments)
        cosine, sine = (angles.real, angles.imag) if isinstance(angles, torch.Tensor) else angles
        padding = 0, max(widths) - pairs
        cosines.append(nn.functional.pad(cosine[0, :, :pairs], padding))
        sines.append(nn.functional.pad(sine[0, :, :pairs], padding))
    return torch.stack(cosines), torch.stack(sines)
