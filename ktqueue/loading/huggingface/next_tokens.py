"""Names of the layers of a folder that predict further tokens (multi-token prediction). Knows no tensors.

transformers has no modules for them, so they are not served. Some folders number them after the model's own layers
(DeepSeek-V3, GLM-4.5), others begin their names with `mtp.` (Qwen3-Next, K-EXAONE). Here all have the former names.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ktqueue.core.errors import CheckpointError

_LAYER = re.compile(r"model\.layers\.(\d{1,7})\.")
_NAME = re.compile(r"(?:model\.)?mtp\.(?:layers\.(?P<layer>\d{1,6})\.)?(?P<rest>.+)")
_OUTSIDE = re.compile(r"(fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm)\.(weight|bias)")
_PARTS = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
"""Tensors outside the numbered layers of `mtp.`, which belong to the first of them, and what DeepSeek calls them."""


def next_token_names(config: Mapping[str, Any]) -> Callable[[str], str | None]:
    """Return a function that maps the name of a tensor of such a layer to `model.layers.N....`, and others to None.

    N is at least the config's `num_hidden_layers`.
    """
    stated, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    first = stated if isinstance(stated, int) else 0
    numbered = range(first, first + count) if isinstance(stated, int) and isinstance(count, int) else range(0)

    def name_of(name: str) -> str | None:
        if layer := _LAYER.match(name):
            return name if int(layer[1]) in numbered else None
        if not (match := _NAME.fullmatch(name)):
            return None
        rest = match["rest"]
        if match["layer"] is None and (outside := _OUTSIDE.fullmatch(rest)):
            rest = f"{_PARTS[outside[1]]}.{outside[2]}"
        return f"model.layers.{first + int(match['layer'] or 0)}.{rest}"

    return name_of


def layer_count(config: Mapping[str, Any], names: list[str]) -> int:
    """Return how many such layers have tensors of these names. Raises CheckpointError if one has none."""
    layers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
    first = int(config["num_hidden_layers"])
    if layers and (layers != {*range(first, first + len(layers))}):
        raise CheckpointError(
            f"layers that predict further tokens must be numbered from 0 on, one of {len(layers)} is "
            f"{max(layers) - first}"
        )
    return len(layers)
