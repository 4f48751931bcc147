"""Dense weights on a device, decoded to the compute type, quantised or both. Matrices with the same input are one.

A quantised matrix multiplies few rows by its weights as they come from memory. For more rows the weights are decoded to
a buffer that all layers share, and torch multiplies. Nothing waits for the device. Knows ModuleWeights, but no file and
no layer.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol

import numpy as np
import torch

from ktqueue.operators import native
from ktqueue.operators.decoder_weights import router_norm
from ktqueue.operators.gpu.kernels import panel_layout, panel_tensor_cores
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertBiases
from ktqueue.operators.gpu.kernels.linear import few_rows_linear
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm
from ktqueue.operators.gpu.kernels.panel_matrix import PanelMatrix, multiply_few
from ktqueue.operators.gpu.kernels.router import Scoring
from ktqueue.operators.gpu.kernels.take_rows import take_rows
from ktqueue.operators.layer_facts import LayerFacts, RouterFacts
from ktqueue.operators.linear_attention import (
    LinearAttentionShape,
    LinearAttentionWeights,
    read_linear_attention,
    split_query_and_gate,
)
from ktqueue.operators.packed import ExpertWeights, Floats, ModuleWeights, PackedMatrix

logger = logging.getLogger(__name__)

DenseType = Literal["dequantised", "quantised", "both"]
"""How dense matrices are kept: in the compute type, in the file's format if that is a quantised one, or both."""
DEFAULT_DENSE: DenseType = "dequantised"
ONE_PRODUCT = (
    {"q_proj", "k_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"q_proj", "kv_a_proj_with_mqa"},
    {"q_a_proj", "kv_a_proj_with_mqa"},
)
"""Linear modules of one parent module that share their input, so that they become one matrix."""
FEW_ROWS = 4
"""Up to this number of rows of 16 bits, quantised weights are multiplied directly. For more they are decoded first."""
FEW_ROWS_BESIDE = 2
"""The same where tensor cores can multiply by quantised weights, which are faster from here on (ADR 0080)."""
WEIGHTS_PER_PIECE = 1 << 24
"""Weights that are decoded at a time: 32 MB of 16 bits, less than the second-level cache of a large GPU."""
WEIGHTS_PER_THREAD = 1 << 22  # that a thread holds as float32 while loading: 16 MB


def stays_quantised(quant: str) -> bool:
    """Whether a matrix of this format can be kept as it is. Float formats are decoded: keeping them gains nothing."""
    return quant not in panel_layout.FLOAT_PRODUCTS


class DenseLinear(Protocol):
    """A linear layer on a device, with weights [rows, columns] in any format."""

    def __call__(
        self,
        x: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        norm: RmsNorm | None = None,
        added_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [tokens, columns] -> [tokens, rows]. `dtype`, `norm`, `added_to`: see few_rows_linear."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weights: ids [tokens] int64 -> [tokens, columns] in the compute type."""


@dataclass(frozen=True, slots=True)
class DecodedLinear:
    """DenseLinear with decoded weights. weight: [rows, columns]; bias: [rows] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(
        self,
        x: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        norm: RmsNorm | None = None,
        added_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See DenseLinear."""
        return few_rows_linear(x, self.weight, self.bias, dtype=dtype, norm=norm, added_to=added_to)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """See DenseLinear."""
        return take_rows(self.weight, ids)


@dataclass(frozen=True, slots=True)
class TwiceHeldLinear:
    """DenseLinear with the same weights twice. `quantised` multiplies few rows of 16 bits, `decoded` all others."""

    quantised: "QuantisedLinear"
    decoded: DecodedLinear

    def __call__(
        self,
        x: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        norm: RmsNorm | None = None,
        added_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See DenseLinear."""
        chosen = self.quantised if self.quantised.multiplies(x) else self.decoded
        return chosen(x, dtype=dtype, norm=norm, added_to=added_to)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """See DenseLinear."""
        return self.decoded.embed(ids)


class DecodeBuffer:
    """Memory for decoded weights, [weights] in the compute type, shared by all quantised matrices."""

    def __init__(self, dtype: torch.dtype, device: str, *, weights_per_piece: int = WEIGHTS_PER_PIECE) -> None:
        self.weights = torch.empty(0, dtype=dtype, device=device)
        self._weights_per_piece = weights_per_piece

    def reserve(self, rows: int, columns: int) -> int:
        """Grow so that a piece of such a matrix fits, at least one row. Returns the number of bytes by which the buffer
        grew. If it grew, earlier views of it are no longer used."""
        wanted = max(min(rows * columns, self._weights_per_piece), columns)
        grown = max(0, wanted - self.weights.numel())
        if grown:
            self.weights = self.weights.new_empty(wanted)
        return grown * self.weights.itemsize


class QuantisedLinear:
    """DenseLinear with quantised weights. parts: matrices of the same columns, one below the other; bias: [rows]."""

    def __init__(
        self, parts: Sequence[PanelMatrix], bias: torch.Tensor | None, buffer: DecodeBuffer, *, few_rows: int = FEW_ROWS
    ) -> None:
        self.parts = parts
        self._bias = bias
        self._buffer = buffer
        self._few_rows = few_rows
        self._rows, self._columns = sum(part.rows for part in parts), parts[0].columns

    def multiplies(self, x: torch.Tensor) -> bool:
        """Whether x [tokens, columns] is multiplied by the quantised weights, without decoding them first."""
        return (1 <= len(x) <= self._few_rows and x.dtype != torch.float32) or self._decodes_on_the_way(x)

    def _decodes_on_the_way(self, x: torch.Tensor) -> bool:
        """Whether tensor cores multiply x [tokens, columns]: see panel_tensor_cores.py."""
        return len(x) > min(self._few_rows, FEW_ROWS_BESIDE) and panel_tensor_cores.pays(x, self._rows)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        norm: RmsNorm | None = None,
        added_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See DenseLinear."""
        if self.multiplies(x):
            out = x.new_empty(len(x), self._rows, dtype=dtype) if added_to is None else added_to
            multiply = panel_tensor_cores.multiply_some if self._decodes_on_the_way(x) else multiply_few
            multiply(self.parts, x, self._bias, out, adds=added_to is not None, norm=norm)
            return out
        x = x if norm is None else add_rms_norm(x, *norm)
        products = []
        for first, weights in self._decoded_pieces():
            bias = None if self._bias is None else self._bias[first : first + len(weights)]
            products.append(few_rows_linear(x, weights, bias, dtype=dtype))
        product = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return product if added_to is None else added_to.add_(product)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """See DenseLinear. Only for a matrix of one part."""
        (part,) = self.parts
        out = self._buffer.weights.new_empty(len(ids), self._columns)
        part.decode(out, ids=ids)
        return out

    def _decoded_pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, weights [rows, columns] in the compute type). Each piece overwrites the one before."""
        buffer = self._buffer.weights
        rows_per_piece = buffer.numel() // self._columns
        for first in range(0, self._rows, rows_per_piece):
            weights = buffer[: min(rows_per_piece, self._rows - first) * self._columns].view(-1, self._columns)
            row = 0
            for part in self.parts:
                begin, end = max(first, row), min(first + len(weights), row + part.rows)
                if begin < end:
                    part.decode(weights[begin - first : end - first], first=begin - row)
                row += part.rows
            yield first, weights


class DenseWeights:
    """Puts the dense weights of a model on `device` in `dtype`. `kind`: how linear layers are kept. `float_norms`: see
    DecoderFacts.

    bytes: device memory of all weights so far.
    """

    def __init__(
        self,
        weights: ModuleWeights,
        dtype: torch.dtype,
        device: str,
        kind: DenseType = "dequantised",
        *,
        float_norms: bool = False,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._kind = kind
        self._float_norms = float_norms
        self._buffer = DecodeBuffer(dtype, device)
        self._warned: set[str] = set()  # formats that were decoded although quantised weights are wanted
        self.bytes = 0

    @property
    def decodes(self) -> bool:
        """Whether matrices are decoded to memory that they share, in steps of more than a few rows."""
        return self._buffer.weights.numel() > 0

    def vector(self, name: str) -> torch.Tensor:
        """A one-dimensional tensor, [size]."""
        return self._count(torch.from_numpy(self._weights.vector(name)).to(self._device, self._dtype, copy=True))

    def norm(self, module: str, *, centred: bool) -> torch.Tensor:
        """The factors of the norm of that name, [size], in float32 with `float_norms`; if it is `centred`, 1 + weight
        in float32; of a LayerNorm [2, size], weights and biases."""
        if self._weights.has(f"{module}.bias"):
            return torch.stack([self.vector(f"{module}.{part}") for part in ("weight", "bias")])
        if centred:
            stored = torch.from_numpy(self._weights.vector(f"{module}.weight"))
            return self._count((stored + 1).to(self._device))
        if self._float_norms:
            return self.numbers(self._weights.vector(f"{module}.weight"))
        return self.vector(f"{module}.weight")

    def optional_vector(self, name: str) -> torch.Tensor | None:
        """A one-dimensional tensor, [size]; None if there is none of that name."""
        return self.vector(name) if self._weights.has(name) else None

    def ones(self, size: int) -> torch.Tensor:
        """The weights of a norm without weights, [size]."""
        return self._count(torch.ones(size, dtype=self._dtype, device=self._device))

    def number(self, name: str) -> float:
        """The number of a tensor that holds one."""
        return float(self._weights.vector(name)[0])

    def scoring(self, layer: str, router: RouterFacts) -> Scoring:
        """How the router of the layer with that name chooses experts, with its vectors."""
        bias, scales = (
            self.numbers(self._weights.vector(f"{layer}.{name}")) if name else None
            for name in (router.bias, router.scales)
        )
        return Scoring(router.sigmoid, router.scale, router.groups, router.groups_used, bias, router.jitter, scales)

    def router_norm(self, layer: LayerFacts) -> torch.Tensor:
        """The factors of the norm of the router's input, [hidden] float32: see RouterFacts.norm."""
        return self.numbers(router_norm(self._weights, layer))

    def expert_biases(self, experts: ExpertWeights) -> ExpertBiases | None:
        """The biases of a layer's experts in float32; None: they have none."""
        biases = [part.bias for part in (experts.gate, experts.up, experts.down) if part.bias is not None]
        if not biases:
            return None
        device = self._device
        return ExpertBiases(*(self._count(torch.from_numpy(bias).to(device, copy=True)) for bias in biases))

    def numbers(self, values: Floats) -> torch.Tensor:
        """Float32 numbers of any shape, on the device."""
        return self._count(torch.from_numpy(values).to(self._device, copy=True))

    def gated_query(self, module: str, heads: int) -> tuple[list[PackedMatrix], list[torch.Tensor]]:
        """The query's part of a projection and the gate's, each with its bias if there is one: see
        split_query_and_gate."""
        parts = split_query_and_gate(self._weights.matrix(f"{module}.weight"), heads)
        bias = self.optional_vector(f"{module}.bias")
        halves = [] if bias is None else [half.reshape(-1) for half in bias.view(heads, 2, -1).unbind(1)]
        return [*parts], halves

    def stored(self, name: str) -> PackedMatrix:
        """A two-dimensional tensor as it is stored."""
        return self._weights.matrix(name)

    def linear_attention(self, module: str, shape: LinearAttentionShape) -> LinearAttentionWeights:
        """The weights of linear attention as they are stored: see read_linear_attention."""
        return read_linear_attention(self._weights, module, shape)

    def matrix(self, name: str) -> torch.Tensor:
        """A two-dimensional tensor, [rows, columns]."""
        return self._decode([self._weights.matrix(name)])

    def linear(self, *modules: str) -> DenseLinear:
        """The linear modules of these names as one, their rows one below the other. All or none have a bias.

        Raises ValueError if they do not fit together.
        """
        parts = [self._weights.matrix(f"{name}.weight") for name in modules]
        biases = [f"{name}.bias" for name in modules if self._weights.has(f"{name}.bias")]
        if 0 < len(biases) < len(modules):
            raise ValueError(f"of {', '.join(modules)} only some have a bias")
        return self.product(parts, torch.cat([self.vector(name) for name in biases]) if biases else None)

    def embedding(self, module: str, *, is_head: bool) -> DenseLinear:
        """The embeddings of that name. `is_head`: whether they are multiplied too. If not, one copy is enough."""
        kind = "dequantised" if self._kind == "both" and not is_head else self._kind
        return self._product([self._weights.matrix(f"{module}.weight")], None, kind)

    def product(self, parts: Sequence[PackedMatrix], bias: torch.Tensor | None = None) -> DenseLinear:
        """Matrices as one, their rows one below the other, with a bias [rows] or None.

        Raises ValueError if they do not fit together.
        """
        return self._product(parts, bias, self._kind)

    def _product(self, parts: Sequence[PackedMatrix], bias: torch.Tensor | None, kind: DenseType) -> DenseLinear:
        if len({part.columns for part in parts}) != 1:
            raise ValueError(f"matrices with {[part.columns for part in parts]} columns do not share their input")
        floats = {part.quant for part in parts if not stays_quantised(part.quant)}
        if kind == "quantised":
            if not floats:
                self.bytes += self._buffer.reserve(sum(part.rows for part in parts), parts[0].columns)
                return QuantisedLinear(self._pack(parts), bias, self._buffer)
            self._warn_decoded(floats)
        decoded = DecodedLinear(self._decode(parts), bias)
        if kind != "both" or floats or self._dtype == torch.float32:
            return decoded
        return TwiceHeldLinear(QuantisedLinear(self._pack(parts), bias, self._buffer), decoded)

    def _pack(self, parts: Sequence[PackedMatrix]) -> list[PanelMatrix]:
        """Pack the matrices. Neighbours of the same format become one part."""
        columns = parts[0].columns
        packed = []
        for quant, neighbours in groupby(parts, lambda part: part.quant):
            same = list(neighbours)
            data = np.concatenate([part.data for part in same]) if len(same) > 1 else same[0].data
            matrix = PackedMatrix(quant, sum(part.rows for part in same), columns, data)
            packed.append(PanelMatrix.pack(matrix, self._device))
            self.bytes += packed[-1].panels.nbytes
        return packed

    def _warn_decoded(self, quants: set[str]) -> None:
        if new := quants - self._warned:
            logger.warning(
                "dense matrices in %s are decoded: only quantised formats can be kept", ", ".join(sorted(new))
            )
            self._warned |= quants

    def _decode(self, parts: Sequence[PackedMatrix]) -> torch.Tensor:
        """The decoded matrices, one below the other."""
        columns = parts[0].columns
        out = torch.empty(sum(part.rows for part in parts), columns, dtype=self._dtype, device=self._device)
        pieces, row, step = [], 0, max(1, WEIGHTS_PER_THREAD // columns)  # (matrix, first row, target)
        for part in parts:
            target = out[row : row + part.rows]
            pieces += [(part, first, target[first : first + step]) for first in range(0, part.rows, step)]
            row += part.rows
        with ThreadPoolExecutor(native.threads()) as threads:
            for _ in threads.map(_decode_rows, *zip(*pieces, strict=True)):
                pass
        return self._count(out)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.nbytes
        return tensor


def _decode_rows(matrix: PackedMatrix, first: int, target: torch.Tensor) -> None:
    """Decode rows of the matrix, from `first` on, into `target`."""
    row_bytes = native.row_bytes(matrix.quant, matrix.columns)
    data = matrix.data[first * row_bytes : (first + len(target)) * row_bytes]
    decoded = native.dequantize(matrix.quant, data, target.numel())
    target.copy_(torch.from_numpy(decoded).view(target.shape).to(target.device))
