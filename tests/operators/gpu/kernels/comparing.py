"""How results of a kernel and its twin are compared; sizes of the small models that operations are compared with."""

from typing import Any

import torch

from ktqueue.operators.gpu.kernels.expert_int8 import Int8Rows
from ktqueue.operators.gpu.kernels.panel_layout import SLAB

DTYPES = (torch.float32, torch.bfloat16)
STEP = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}
"""About two last bits, as a share of a number."""


def assert_same(ours: torch.Tensor, twin: torch.Tensor) -> None:
    """Equal except for the last bit or two, in which sums and exponentials differ."""
    assert ours.dtype == twin.dtype
    a, b = ours.float(), twin.float()
    torch.testing.assert_close(a, b, rtol=STEP[twin.dtype], atol=1e-5, equal_nan=True)
    if twin.dtype != torch.float32 and len(b):
        assert ((a == b) | b.isnan()).float().mean() > 0.995  # each rounding is where it belongs


def check_rounded(rows: Int8Rows, x: torch.Tensor) -> None:
    """`rows` are x [tokens, columns], which is finite and has no slab of zeros, rounded to the nearest int8.

    Near a tie a GPU may round to either side: it multiplies and rounds at once, and the twin multiplies first.
    """
    slabs = x.double().view(len(x), -1, SLAB)
    scales = slabs.abs().amax(2) / 127
    torch.testing.assert_close(rows.scales.double(), scales, rtol=1e-6, atol=0)
    assert ((slabs / scales[:, :, None]).flatten(1) - rows.codes.double()).abs().max() <= 0.5 + 1e-4
    halves = rows.codes.int().view(len(x), -1, 2, SLAB // 2).sum(3)
    assert torch.equal(rows.sums, (halves[:, :, 0] + 65536 * halves[:, :, 1]).int())


def clones(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with their own tensors."""

    def clone(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(clone(part) for part in x)
        return x.clone() if isinstance(x, torch.Tensor) else x

    return {name: clone(x) for name, x in arguments.items()}


def config_sizes(**changes: Any) -> dict[str, Any]:
    """Sizes of a small config. Each model has its own renormalisation and norms."""
    usual = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return usual | changes
