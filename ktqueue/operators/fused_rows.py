"""Weights whose rows a model keeps one below the other in one matrix, under the names that the decoders know.

Phi-3 has `qkv_proj` for query, key and value, and `gate_up_proj`. Knows no kernel.
"""

from dataclasses import dataclass, replace

from ktqueue.operators.packed import ExpertWeights, Floats, ModuleWeights, PackedMatrix

_QUERY, _KEY, _VALUE = "q_proj.weight", "k_proj.weight", "v_proj.weight"
_GATE, _UP = "gate_proj.weight", "up_proj.weight"
_FUSED = {
    **dict.fromkeys((_QUERY, _KEY, _VALUE), "qkv_proj.weight"),
    **dict.fromkeys((_GATE, _UP), "gate_up_proj.weight"),
}


@dataclass(frozen=True, slots=True)
class SplitRows:
    """ModuleWeights over `weights`. query_rows, key_rows: of query and key; the value has as many as the key."""

    weights: ModuleWeights
    query_rows: int
    key_rows: int

    def has(self, name: str) -> bool:
        return self.weights.has(_fused_name(name))

    def matrix(self, name: str) -> PackedMatrix:
        """See ModuleWeights. Each row is packed by itself, so a part is a view."""
        whole = self.weights.matrix(_fused_name(name))
        query, key, half = self.query_rows, self.key_rows, whole.rows // 2
        rows = {_QUERY: (0, query), _KEY: (query, key), _VALUE: (query + key, key), _GATE: (0, half), _UP: (half, half)}
        first, count = rows.get(_leaf(name), (0, whole.rows))
        row_bytes = whole.data.size // whole.rows
        return replace(whole, rows=count, data=whole.data[first * row_bytes : (first + count) * row_bytes])

    def vector(self, name: str) -> Floats:
        return self.weights.vector(name)

    def experts(self, name: str) -> ExpertWeights:
        return self.weights.experts(name)


def _fused_name(name: str) -> str:
    leaf = _leaf(name)
    return name.removesuffix(leaf) + _FUSED.get(leaf, leaf)


def _leaf(name: str) -> str:
    return ".".join(name.split(".")[-2:])
