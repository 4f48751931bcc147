"""Names and shapes of the layers of a folder that predict further tokens (multi-token prediction). Knows no values.

transformers has no modules for them. The first of them may draft: see loading/next_token_layer.py. Some folders number
them after the model's own layers (DeepSeek-V3, GLM-4.5), others begin their names with `mtp.` (Qwen3-Next, K-EXAONE).
Here all have the former names.
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
_JOINING = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""What each of these layers has beside the tensors of a layer of the model."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""


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


def check_complete(own: Shapes, further: Shapes) -> None:
    """Check that each further layer has the tensors of one of the model's own layers, and what joins it to them.

    Raises CheckpointError that names the first tensor that is missing or of another shape.
    """
    wanted = [*_by_layer(own).values()]
    for layer, found in _by_layer(further).items():
        # Layers differ in what they have. The most similar one tells what is missing.
        missing = min((shapes.items() - found.items() for shapes in reversed(wanted)), key=len, default=set())
        for name, shape in sorted(missing):
            where = f"model.layers.{layer}.{name}"
            if name in found:
                raise CheckpointError(f"tensor {where!r} must be {list(shape)}, it is {list(found[name])}")
            raise CheckpointError(f"tensor {where!r} is missing")
        for name in _JOINING:
            if name not in found:
                raise CheckpointError(f"tensor {f'model.layers.{layer}.{name}'!r} is missing")


def _by_layer(shapes: Shapes) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return the shapes of each layer's tensors, by their names below the layer."""
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if layer := _LAYER.match(name):
            layers.setdefault(int(layer[1]), {})[name[layer.end() :]] = shape
    return layers
