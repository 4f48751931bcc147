"""The activation between the products of an MLP: gate activation times up."""

import torch

from ktqueue.operators import reference
from ktqueue.operators.gpu.kernels.operation import check_fits, runs_kernel, tl, triton
from ktqueue.operators.native import ActivationName

ACTIVATIONS: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh")
"""Activations of a dense MLP's gate. Experts also have swiglu_clamped and silu_limited."""

_MOST_COLUMNS = 1024
"""Columns that one program computes."""


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """silu, gelu or gelu_tanh of `gate`, float32."""
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # gelu_tanh: (1 + tanh(y)) / 2 = sigmoid(2 y)
        gate = gate * tl.sigmoid(2.0 * (0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    return gate


@triton.jit
def joined(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Join gate and up of an expert, float32: a native.ActivationName, with its numbers."""
    if ACTIVATION == "swiglu_clamped":  # comparisons, so that NaN stays NaN
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
        result = gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)
    elif ACTIVATION == "silu_limited":
        gate = activated(gate, "silu")
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        result = gate * tl.where(up < -LIMIT, -LIMIT, up)
    else:
        result = activated(gate, ACTIVATION) * up
    return result


@triton.jit
def _gated(gate_up, out, INTERMEDIATE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """One program for BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    source = gate_up + token * (2 * INTERMEDIATE) + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + INTERMEDIATE, mask=inside, other=0.0).to(tl.float32)
    gate = activated(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * INTERMEDIATE + column, (gate * up).to(out.dtype.element_ty), mask=inside)


def gated(activation: ActivationName, gate_up: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up of a dense MLP: gate_up [tokens, 2 * intermediate] -> [tokens, intermediate], its dtype.

    The first half of a row is gate, the second up. Raises ValueError for an activation that is not in ACTIVATIONS.
    """
    fits = activation in ACTIVATIONS and gate_up.shape[1] % 2 == 0
    check_fits(fits, f"gated by {activation}", gate_up=gate_up)
    if not runs_kernel(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return reference.activate(activation, gate, up, 0.0, 0.0)
    tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, intermediate)
    if tokens:
        block = min(triton.next_power_of_2(intermediate), _MOST_COLUMNS)
        _gated[(tokens, triton.cdiv(intermediate, block))](
            gate_up, out,
            INTERMEDIATE=intermediate, ACTIVATION=activation, BLOCK=block, num_warps=max(block // 256, 1),
        )  # fmt: skip
    return out
