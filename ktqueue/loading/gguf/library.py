"""What the gguf library knows: names of tensors in transformers and in GGUF, and ggml's tensor types."""

import re

import gguf

from ktqueue.core.errors import CheckpointError
from ktqueue.families.family import GgufLayout
from ktqueue.loading.storage_format import packaged_formats

MODEL_MODULES = ("model.embed_tokens", "model.norm", "lm_head")
_ARCHITECTURES = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
_Q2_0 = 42  # a type of llama.cpp that the library lacks
_SPELLINGS = (
    ("e_score_correction_bias", "e_score_correction.bias"),
    ("mlp.expert_bias", "mlp.expert_bias.bias"),
    ("gate.moe_statics.", "moe_statics."),
    ("linear_attn.dt_bias", "linear_attn.dt_proj.bias"),
    ("block_sparse_moe.router.", "mlp.gate."),
    ("block_sparse_moe.", "mlp."),
    (".layer_scalar", ".layer_scalar.weight"),
    (".router.scale", ".router.proj.scale"),
    (".router.per_expert_scale", ".experts.down_proj.scale"),
)
"""What names of transformers have, and the library's tables instead."""
ROW_VECTORS = ("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
"""Endings of the names of matrices of one row, which GGUF files have as vectors."""
ROUTERS = (
    *(".mlp.gate.weight", ".mlp.router.weight", ".mlp.gate.wg.weight"),
    *(".block_sparse_moe.router.weight", ".feed_forward.router.weight", ".mlp.router.gate.weight"),
    ".router.proj.weight",
)
EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


_HALVES = re.compile(r"model\.layers\.(\d+)\.experts\.(gate|up)_proj\.weight")
"""Matrices of Gemma 4's experts, for which the library has one name for both as one tensor."""
_FURTHER_MODULES = "eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head.head", "shared_head.norm"
_NEXT_TOKENS = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(map(re.escape, _FURTHER_MODULES))})\.weight")
"""Tensors that only layers have which predict further tokens. The library knows them for some architectures."""


class TensorNameMap:
    """Translates the tensor names of one architecture from transformers to GGUF. Raises CheckpointError for an unknown
    architecture."""

    def __init__(self, layout: GgufLayout, layers: int) -> None:
        architecture = layout.names or layout.architecture
        if architecture not in _ARCHITECTURES:
            raise CheckpointError(f"the gguf library has no names of tensors for the architecture {architecture!r}")
        self._bare = layout.tensors if layout.bare_tensors else ()
        self._map = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], layers)

    def find(self, name: str) -> str | None:
        """Translate `model.norm.weight` to `output_norm.weight`; None if the architecture has no such tensor."""
        if match := _NEXT_TOKENS.fullmatch(name):
            return f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.weight"
        if match := _HALVES.fullmatch(name):
            return f"blk.{match[1]}.ffn_{match[2]}_exps.weight"
        library_name = name
        for spelling, in_tables in _SPELLINGS:
            library_name = library_name.replace(spelling, in_tables)
        found: str | None = self._map.get_name(library_name, try_suffixes=(".weight", ".bias", ".scale"))
        if found and self._bare and name.endswith(self._bare):
            return found.removesuffix(".bias")
        return f"{found}.weight" if found and name.endswith(".sinks") else found


def gguf_names(layout: GgufLayout, layers: range) -> dict[str, str]:
    """Map each GGUF tensor name that these layers may have, or a model outside of layers, to its transformers name.

    Layers that do not begin at 0 are those that predict further tokens.

    The three expert tensors of a layer appear as `...experts.gate_proj.weight`, `up_proj` and `down_proj`.
    """
    names = TensorNameMap(layout, layers.stop)
    of_layer = (*layout.modules, *(_FURTHER_MODULES if layers.start else ()))
    modules = [*MODEL_MODULES, *(f"model.layers.{i}.{m}" for i in layers for m in of_layer)]
    transformers_names: dict[str, str] = {}
    for module in modules:
        for part in ("weight", "bias"):
            name = names.find(f"{module}.{part}")
            if name is not None:
                transformers_names[name] = f"{module}.{part}"
    for tensor in (f"model.layers.{i}.{t}" for i in layers for t in layout.tensors):
        if (name := names.find(tensor)) is not None:
            transformers_names[name] = tensor
    return transformers_names


def split_expert_name(name: str) -> tuple[str, str] | None:
    """Split `m.experts.up_proj.weight` into (`m.experts`, `up`), and its bias into (`m.experts`, `up_bias`).

    Returns None for any other name.
    """
    module, _, rest = name.rpartition(".experts.")
    matrix, _, kind = rest.partition(".")
    part = EXPERT_PARTS.get(matrix)
    if not (module and part and kind in ("weight", "bias")):
        return None
    return f"{module}.experts", part if kind == "weight" else f"{part}_bias"


def type_name(type_id: int) -> str:
    """Return the name of ggml's tensor type number, such as `Q4_K`, or of a package's. Otherwise it is `type 99`.

    Raises CheckpointError if a package's format cannot be used.
    """
    if type_id == _Q2_0:
        return "Q2_0"
    try:
        return str(gguf.GGMLQuantizationType(type_id).name)
    except ValueError:
        packaged = (found.name for found in packaged_formats() if found.gguf_type == type_id)
        return next(packaged, f"type {type_id}")
