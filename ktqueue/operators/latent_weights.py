"""The matrices of multi-head latent attention, and of its indexer, in the form that the compiled decoder needs. Knows
no kernel."""

from dataclasses import dataclass

import numpy as np

from ktqueue.operators import native
from ktqueue.operators.latent_shape import IndexerShape, LatentShape
from ktqueue.operators.linear_attention import rows_of_parts, take_rows
from ktqueue.operators.packed import Floats, JoinedMatrix, ModuleWeights, PackedMatrix

_PANEL_ROWS = 16  # of a panel, in which the matrix of each head begins: see HeadsCall in csrc/model/linear.h
_NUMBERS = {"F32": "f4", "F16": "f2", "BF16": "u2"}  # formats whose numbers can be moved


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The matrices of a layer with their biases. low_rank: of the query, with a norm behind it, or None; query: [heads
    * (plain + rotary), rank or hidden]; key: [latent + rotary, hidden]; absorb: for each head [latent, plain]; expand:
    for each head [value, latent]. The pairs of rotary rows are half the rotary rows apart."""

    low_rank: tuple[PackedMatrix, Floats | None] | None
    query: tuple[PackedMatrix, Floats | None]
    key: tuple[PackedMatrix, Floats | None]
    absorb: PackedMatrix
    expand: PackedMatrix


def read_latent_attention(weights: ModuleWeights, name: str, shape: LatentShape) -> LatentWeights:
    """Read the attention with that name. Raises ValueError if the matrix that makes keys and values does not fit."""

    def linear(part: str) -> tuple[PackedMatrix, Floats | None]:
        bias = f"{name}.{part}.bias"
        return weights.matrix(f"{name}.{part}.weight"), weights.vector(bias) if weights.has(bias) else None

    def rotated(part: str, groups: int, plain: int) -> tuple[PackedMatrix, Floats | None]:
        matrix, bias = linear(part)
        if not shape.interleaved:
            return matrix, bias
        pairs = np.arange(plain, plain + shape.rotary)
        of_group = np.concatenate([np.arange(plain), pairs[0::2], pairs[1::2]])
        rows = (np.arange(groups)[:, None] * len(of_group) + of_group).reshape(-1)
        return take_rows(matrix, rows), None if bias is None else bias[rows]

    absorb, expand = split_up_rows(weights.matrix(f"{name}.kv_b_proj.weight"), shape)
    return LatentWeights(
        low_rank=linear("q_a_proj") if shape.low_rank else None,
        query=rotated("q_b_proj" if shape.low_rank else "q_proj", shape.heads, shape.plain),
        key=rotated("kv_a_proj_with_mqa", 1, shape.latent),
        absorb=_in_panels(absorb, shape.heads),
        expand=_in_panels(expand, shape.heads),
    )


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """The parts of an indexer. query: [heads * key, rank]; key: [key, hidden]; norm: of keys, weights and biases [2 *
    key]. The pairs of rotary rows are half the rotary rows apart."""

    query: PackedMatrix
    key: PackedMatrix
    norm: Floats


def read_indexer(weights: ModuleWeights, name: str, shape: IndexerShape, rotary: int) -> IndexerWeights:
    """Read the indexer with that name, whose queries and keys have `rotary` columns that are rotated, the first."""
    query, key = weights.matrix(f"{name}.wq_b.weight"), weights.matrix(f"{name}.wk.weight")
    norms = weights.vector(f"{name}.k_norm.weight"), weights.vector(f"{name}.k_norm.bias")
    if shape.interleaved:
        order = np.concatenate([np.arange(0, rotary, 2), np.arange(1, rotary, 2), np.arange(rotary, shape.key)])
        query = take_rows(query, (np.arange(shape.heads)[:, None] * shape.key + order).reshape(-1))
        key = take_rows(key, order)
        norms = norms[0][order], norms[1][order]
    return IndexerWeights(query, key, np.concatenate(norms))


def split_up_rows(up: PackedMatrix, shape: LatentShape) -> tuple[PackedMatrix, PackedMatrix]:
    """Split the matrix that expands latents to keys and values into [heads * latent, plain], which is applied to
    queries, and [heads * value, latent], which is applied to results.

    If the file has two matrices, they are these, as they are stored. Otherwise the second keeps the format of `up`,
    whose rows it has. The first has columns of `up`, which are decoded unless the format has a number for each weight.
    Raises ValueError for another size.
    """
    wanted = (shape.heads * (shape.plain + shape.value), shape.latent)
    if (up.rows, up.columns) != wanted:
        raise ValueError(f"kv_b_proj.weight must be {list(wanted)}, got {[up.rows, up.columns]}")
    if isinstance(up, JoinedMatrix):
        return up.keys, up.values
    keys, values = (take_rows(up, rows) for rows in rows_of_parts(shape.heads, (shape.plain, shape.value)))
    quant = _absorbed_format(up.quant)
    numbers = keys.data
    if quant != up.quant:
        numbers = native.dequantize(up.quant, keys.data, keys.rows * keys.columns).view(np.uint8)
    columns = numbers.view(_NUMBERS[quant]).reshape(shape.heads, shape.plain, shape.latent).transpose(0, 2, 1)
    data = np.ascontiguousarray(columns).reshape(-1).view(np.uint8)
    return PackedMatrix(quant, shape.heads * shape.latent, shape.plain, data), values


def up_matrix_bytes(quant: str, parts: tuple[str, str] | None, shape: LatentShape) -> int:
    """Bytes of both results of split_up_rows once packed. parts: the formats of its two tensors, or None."""
    absorb, expand = parts or (_absorbed_format(quant), quant)
    return native.packed_bytes(absorb, shape.heads * _padded(shape.latent), shape.plain) + native.packed_bytes(
        expand, shape.heads * _padded(shape.value), shape.latent
    )


def _absorbed_format(quant: str) -> str:
    return quant if quant in _NUMBERS else "F32"


def _padded(rows: int) -> int:
    return -(-rows // _PANEL_ROWS) * _PANEL_ROWS


def _in_panels(matrix: PackedMatrix, heads: int) -> PackedMatrix:
    """Repeat rows so that the matrix of each head has a multiple of 16. What they give is not used."""
    rows = matrix.rows // heads
    of_head = np.minimum(np.arange(_padded(rows)), rows - 1)
    if len(of_head) == rows:
        return matrix
    return take_rows(matrix, (np.arange(heads)[:, None] * rows + of_head).reshape(-1))
