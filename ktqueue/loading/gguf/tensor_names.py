"""transformers parameter names to GGUF tensor names and back, through the gguf library's maps."""

import gguf

from ktqueue.loading.gguf.families import MODEL_MODULES, ModelFamily

_ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


class TensorNameMap:
    """HF module names to GGUF tensor names for one architecture, through the library's own tables."""

    def __init__(self, architecture: str, layers: int) -> None:
        self._map = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], layers)

    def find(self, name: str) -> str | None:
        """`model.norm.weight` to `output_norm.weight`; None where the architecture has no such tensor."""
        spelt = name.replace("e_score_correction_bias", "e_score_correction.bias")  # as its tables have it
        found: str | None = self._map.get_name(spelt, try_suffixes=(".weight", ".bias"))
        return found


def gguf_names(family: ModelFamily, layers: int) -> dict[str, str]:
    """GGUF tensor name to transformers name for all that a model of `layers` layers may hold.

    The three stacks of an experts module appear as `...experts.gate_proj.weight` and so on.
    """
    names = TensorNameMap(family.architecture, layers)
    modules = [*MODEL_MODULES, *(f"model.layers.{i}.{m}" for i in range(layers) for m in family.layer_modules)]
    found: dict[str, str] = {}
    for module in modules:
        for part in ("weight", "bias"):
            name = names.find(f"{module}.{part}")
            if name is not None:
                found[name] = f"{module}.{part}"
    for tensor in (f"model.layers.{i}.{t}" for i in range(layers) for t in family.layer_tensors):
        if (name := names.find(tensor)) is not None:
            found[name] = tensor
    return found


def split_expert_name(name: str) -> tuple[str, str] | None:
    """`m.experts.up_proj.weight` to (`m.experts`, `up`); None for any other name."""
    module, _, rest = name.rpartition(".experts.")
    part = EXPERT_PARTS.get(rest.removesuffix(".weight"))
    return (f"{module}.experts", part) if module and part else None
