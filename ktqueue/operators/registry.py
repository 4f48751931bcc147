"""The operators that rules can name. To add one, write its class and enter it here."""

from ktqueue.operators.base import Operator
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.experts import CpuExperts
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.latent_attention import LatentAttention
from ktqueue.operators.linear import CpuLinear

OPERATORS: dict[str, type[Operator]] = {
    operator.__name__: operator for operator in (CpuDecoder, CpuExperts, CpuLinear, GpuDecoder, LatentAttention)
}
"""Operators by the name that rules use: the name of the class."""
