"""How far back a transformers attention module looks. Knows no weights and no step."""

from typing import Any

from torch import nn


def window_of(module: nn.Module, config: Any, passed: int | None = None) -> int:
    """Keys that a token sees at most, itself included; 0: all.

    Where the layers of `config` are of kinds, those that slide have its window, as in the masks that transformers
    makes, whatever the module says. Else it is what the module passes on, or has, or what `config` has.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[module.layer_idx] != "sliding_attention":
        return 0
    stated = getattr(config, "sliding_window", None)
    if not kinds:  # Qwen2-MoE's has one without passing it on
        stated = passed or getattr(module, "sliding_window", stated)
    return stated or 0
