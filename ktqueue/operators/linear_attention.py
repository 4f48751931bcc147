"""Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5): its sizes and its weights, for all devices.

A sequence has a state of constant size instead of keys and values. Each token turns the state S [key, value] of a head
into a * S + k (v - k a S) * b, and reads q S. Source: Gated Delta Networks, arXiv 2412.06464, and transformers'
modeling_qwen3_next.py. Knows no kernel and no file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ktqueue.operators.packed import Floats, ModuleWeights, PackedMatrix

TILED = "linear_value_heads_tiled"
"""A config key of ours. Weights of GGUF files may have value heads in turns, one of each key head after another."""


@dataclass(frozen=True, slots=True)
class LinearAttentionShape:
    """The sizes of one layer. Each key head serves `value_heads / key_heads` value heads: neighbours, or with `tiled`
    every `key_heads`-th one. taps: tokens of the convolution, the last of which is the token itself."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False

    @property
    def keys(self) -> int:
        """Columns of all key heads, and of all query heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: query, key, value."""
        return 2 * self.keys + self.values

    @property
    def state_numbers(self) -> int:
        """Float32 numbers of one sequence's state: recent inputs of the convolution, and a matrix for each head."""
        return (self.taps - 1) * self.channels + self.value_heads * self.key_dim * self.value_dim


def linear_attention_shape(config: Any) -> LinearAttentionShape:
    """Read the sizes from the config of Qwen3-Next or its successors."""
    return LinearAttentionShape(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        bool(getattr(config, TILED, False)),
    )


@dataclass(frozen=True, slots=True)
class LinearAttentionWeights:
    """The weights of one layer but for the output matrix. qkv: [channels, hidden]; gate: [values, hidden]; decay, rate:
    [value_heads, hidden]; convolution: [taps, channels]; decay_rates, decay_biases: [value_heads]; norm: [value_dim].

    The factor a of a token is exp(decay_rates * softplus(decay(x) + decay_biases)), and b is sigmoid(rate(x)).
    """

    qkv: PackedMatrix
    gate: PackedMatrix
    decay: PackedMatrix
    rate: PackedMatrix
    convolution: Floats
    decay_rates: Floats
    decay_biases: Floats
    norm: Floats


def read_linear_attention(weights: ModuleWeights, name: str, shape: LinearAttentionShape) -> LinearAttentionWeights:
    """Read the weights of the module with that name.

    Its projections are four matrices, or two whose rows belong to one key head after another (Qwen3-Next). Raises
    ValueError if a size is wrong.
    """
    if weights.has(f"{name}.in_proj_qkvz.weight"):
        read: Callable[..., tuple[PackedMatrix, ...]] = _from_two
    else:
        read = _from_four
    qkv, gate, decay, rate = read(weights, name, shape)
    for matrix, rows in ((qkv, shape.channels), (gate, shape.values)):
        if matrix.rows != rows:
            raise ValueError(f"{name}: a projection has {matrix.rows} rows, expected {rows}")
    convolution = weights.vector(f"{name}.conv1d.weight").reshape(shape.channels, shape.taps)
    return LinearAttentionWeights(
        qkv,
        gate,
        decay,
        rate,
        np.ascontiguousarray(convolution.T),
        -np.exp(weights.vector(f"{name}.A_log")),
        weights.vector(f"{name}.dt_bias"),
        weights.vector(f"{name}.norm.weight"),
    )


def _from_four(weights: ModuleWeights, name: str, _: LinearAttentionShape) -> tuple[PackedMatrix, ...]:
    return tuple(weights.matrix(f"{name}.in_proj_{part}.weight") for part in ("qkv", "z", "a", "b"))


def _from_two(weights: ModuleWeights, name: str, shape: LinearAttentionShape) -> tuple[PackedMatrix, ...]:
    """Split [query, key, values, gates] and [rates, decays] of each key head."""
    shared = shape.value_heads // shape.key_heads
    parts = (shape.key_dim, shape.key_dim, shared * shape.value_dim, shared * shape.value_dim)
    query, key, value, gate = rows_of_parts(shape.key_heads, parts)
    rate, decay = rows_of_parts(shape.key_heads, (shared, shared))
    both, scalars = weights.matrix(f"{name}.in_proj_qkvz.weight"), weights.matrix(f"{name}.in_proj_ba.weight")
    return (
        take_rows(both, np.concatenate([query, key, value])),
        take_rows(both, gate),
        take_rows(scalars, decay),
        take_rows(scalars, rate),
    )


def rows_of_parts(groups: int, parts: tuple[int, ...]) -> list[npt.NDArray[np.int64]]:
    """Return for each part of a group its rows in all groups, in order."""
    rows = np.arange(groups * sum(parts)).reshape(groups, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(parts)[:-1], axis=1)]


def split_query_and_gate(matrix: PackedMatrix, heads: int) -> tuple[PackedMatrix, PackedMatrix]:
    """Split a projection whose rows are the query, then the output's gate, of one head after another."""
    query, gate = rows_of_parts(heads, (matrix.rows // heads // 2,) * 2)
    return take_rows(matrix, query), take_rows(matrix, gate)


def take_rows(matrix: PackedMatrix, rows: npt.NDArray[np.int64]) -> PackedMatrix:
    """Return a copy of these rows, each of which is packed by itself. Raises ValueError for a row out of range."""
    if rows.max(initial=-1) >= matrix.rows:
        raise ValueError(f"a matrix has {matrix.rows} rows, needed are {rows.max() + 1}")
    data = matrix.data.reshape(matrix.rows, -1)[rows].reshape(-1)
    return PackedMatrix(matrix.quant, len(rows), matrix.columns, data)
