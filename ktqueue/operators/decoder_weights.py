"""Reads the weights of a model as both decoders need them, and the vectors and dense MLPs of layers for CpuDecoder."""

import numpy as np

from ktqueue.operators import native
from ktqueue.operators.decoder_facts import DecoderFacts
from ktqueue.operators.fused_rows import SplitRows
from ktqueue.operators.layer_facts import LayerFacts
from ktqueue.operators.packed import ExpertWeights, ModuleWeights, PackedExperts
from ktqueue.operators.padded_values import PaddedValues
from ktqueue.operators.rotary_rows import in_rotary_order


def in_own_order(weights: ModuleWeights, facts: DecoderFacts) -> ModuleWeights:
    """Return the weights with separate matrices, whose rows have the order and the number that the kernels expect."""
    first = facts.layers[0]
    if facts.fused:
        weights = SplitRows(weights, first.heads * first.head_dim, first.kv_heads * first.head_dim)
    if facts.value_dim:
        weights = PaddedValues(weights, first.head_dim, facts.value_dim)
    return in_rotary_order(weights, first.head_dim, facts.interleaved)


def norm_weights(weights: ModuleWeights, facts: DecoderFacts, name: str) -> native.Floats:
    """Return the factors of the norm with that name, [columns] float32; of a LayerNorm, whose biases follow, twice as
    many."""
    stored = weights.vector(f"{name}.weight")
    if weights.has(f"{name}.bias"):
        return np.concatenate([stored, weights.vector(f"{name}.bias")])
    return stored + np.float32(1) if facts.centred else stored


def router_norm(weights: ModuleWeights, layer: LayerFacts) -> native.Floats:
    """Return the factors of the norm of the router's input, [hidden] float32: see RouterFacts.norm."""
    assert layer.router is not None
    stored = weights.vector(f"{layer.name}.{layer.router.norm}")
    return stored * np.float32(len(stored) ** -0.5)


def one_expert(weights: ModuleWeights, name: str) -> ExpertWeights:
    """Describe a dense gated MLP as a layer of one expert."""

    def stack(part: str) -> PackedExperts:
        matrix = weights.matrix(f"{name}.{part}.weight")
        bias = weights.vector(f"{name}.{part}.bias")[None] if weights.has(f"{name}.{part}.bias") else None
        return PackedExperts(matrix.quant, matrix.rows, matrix.columns, [matrix.data], bias)

    return ExpertWeights(stack("gate_proj"), stack("up_proj"), stack("down_proj"))
