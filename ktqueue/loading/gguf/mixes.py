"""Mixes of formats, by the names that llama.cpp gives them: which tensor of a model has which format.

Most matrices have the format of the mix. Those that lose most by quantisation have more bits: the output, the values of
attention, and the second matrix of MLPs in some layers. Source: llama-quant.cpp of llama.cpp.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ktqueue.loading.weight_formats import FILE_BLOCKS

BASES = {
    "Q2_K": "Q2_K",
    "Q3_K_M": "Q3_K",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "Q6_K": "Q6_K",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
}
"""The mixes, and the format of most matrices of each."""

_SMALLER_BLOCKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
_VALUES = re.compile(r"blk\.(\d+)\.(?:attn_v|attn_qkv|attn_kv_b)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(.*)\.weight")
_EIGHT_EXPERTS = 8  # Mixtral's number, for which llama.cpp has rules of its own
_SHARED_VALUES = 4  # heads of queries for each head of values, from which values are cheap enough for more bits
_LARGE = {"llama": 2, "qwen2": 1}
"""Model types that llama.cpp calls 70B models if they have 80 layers, and this many query heads for a value head."""
_LARGE_LAYERS = 80


def fitting_format(quant: str, columns: int) -> str:
    """Return `quant` if rows of `columns` are whole blocks of it, else the nearest format for which they are.

    That has blocks of 32, or is F16.
    """
    for candidate in (quant, _SMALLER_BLOCKS.get(quant, "F16")):
        if columns % FILE_BLOCKS[candidate][0] == 0:
            return candidate
    return "F16"


@dataclass(frozen=True, slots=True)
class Mix:
    """The formats of a model's matrices in the mix `name`, one of BASES.

    layers: of the model; experts: routed experts of a layer, 0 in a dense model; shared_values: heads of queries for
    each head of values; value_layers: layers with values of attention, in order; has_output: the output is not the
    embedding; has_importance: an importance matrix is used; is_large: llama.cpp calls it a 70B model.
    """

    name: str
    layers: int
    experts: int
    shared_values: int
    value_layers: tuple[int, ...]
    has_output: bool
    has_importance: bool
    is_large: bool = False

    @classmethod
    def of_model(cls, name: str, config: Mapping[str, Any], tensors: Iterable[str], *, has_importance: bool) -> "Mix":
        """Return the mix of a model with this transformers config and the GGUF names `tensors`."""
        names = [*tensors]
        heads = int(config["num_attention_heads"])
        counts = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        shared_values = heads // int(config.get("num_key_value_heads") or heads)
        layers = int(config["num_hidden_layers"])
        least_shared = _LARGE.get(str(config.get("model_type")))
        return cls(
            name,
            layers=layers,
            experts=next((int(count) for count in counts if count), 0),
            shared_values=shared_values,
            value_layers=tuple(sorted(int(match[1]) for tensor in names if (match := _VALUES.fullmatch(tensor)))),
            has_output="output.weight" in names,
            has_importance=has_importance,
            is_large=layers == _LARGE_LAYERS and least_shared is not None and shared_values >= least_shared,
        )

    def format_of(self, tensor: str, columns: int) -> str:
        """Return the format of a matrix with rows of `columns`, by its GGUF name."""
        base = BASES[self.name]
        if tensor == "output.weight" or (tensor == "token_embd.weight" and not self.has_output):
            quant = "Q6_K"
        elif match := _VALUES.fullmatch(tensor):
            quant = self._values(base, self.value_layers.index(int(match[1])))
        elif match := _LAYER.fullmatch(tensor):
            quant = self._layer(base, match[2], int(match[1]))
        else:
            quant = base
        return fitting_format(quant, columns)

    def _values(self, base: str, place: int) -> str:
        """Return the format of the values of the layer at `place` among those that have values."""
        if self.experts == _EIGHT_EXPERTS:
            return "Q8_0"
        quant = self._values_by_place(base, place)
        return "Q5_K" if self.is_large and quant in ("Q3_K", "Q4_K") else quant

    def _values_by_place(self, base: str, place: int) -> str:
        is_shared = self.shared_values >= _SHARED_VALUES
        match self.name:
            case "Q2_K":
                return "Q4_K" if is_shared else "Q3_K"
            case "Q3_K_M":
                return "Q5_K" if place < 2 else "Q4_K"
            case "Q4_K_M" | "Q5_K_M" if _has_more_bits(place, len(self.value_layers)):
                return "Q6_K"
            case "Q4_K_S" if place < 4:
                return "Q5_K"
            case "IQ4_NL" | "IQ4_XS" if is_shared:
                return "Q5_K"
        return base

    def _layer(self, base: str, part: str, layer: int) -> str:
        is_mixtral = self.experts == _EIGHT_EXPERTS
        if part == "attn_k" and is_mixtral:
            return "Q8_0"
        if part == "attn_output":
            if is_mixtral:
                return base if base in ("Q5_K", "Q6_K") else "Q5_K"
            return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K"}.get(self.name, base)
        if part.startswith("ffn_down"):
            return self._down(base, layer)
        return base

    def _down(self, base: str, layer: int) -> str:
        """Return the format of the second matrix of an MLP or of experts."""
        is_early = layer < self.layers // 8
        match self.name:
            case "Q2_K":
                return "Q3_K"
            case "Q3_K_M":
                return "Q5_K" if layer < self.layers // 16 else "Q4_K"
            case "Q4_K_M" | "Q5_K_M" if _has_more_bits(layer, self.layers):
                return "Q6_K"
            case "Q4_K_S" if is_early:
                return "Q5_K"
            case "IQ4_NL" | "IQ4_XS" if is_early and not self.has_importance:
                return "Q5_K"
        return base


def _has_more_bits(place: int, count: int) -> bool:
    """Whether a layer is in the first or last eighth, or one of every three between."""
    return place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2
