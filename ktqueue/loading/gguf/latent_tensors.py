"""The matrix that makes keys and values of latents, where a GGUF file holds it in two (`attn_k_b`, `attn_v_b`).

Files written since April 2025 do: each head's part for keys transposed, as absorbed attention multiplies it.
transformers knows one matrix, in which each head's rows for keys come before its rows for values.
"""

import re
from dataclasses import dataclass

import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint_tensors import StoredTensor
from ktqueue.operators.packed import PackedMatrix

_KEYS = re.compile(r"(blk\.\d+)\.attn_k_b\.weight")


@dataclass(frozen=True, slots=True)
class JoinedTensor(StoredTensor):
    """[heads * (plain + value), latent] of `data`, which is the keys' [heads, latent, plain], and `values` [heads,
    value, latent]. It is joined anew whenever it is asked for, and packed as F32."""

    values: StoredTensor | None = None

    @property
    def nbytes(self) -> int:
        return self.data.size + (self.values.nbytes if self.values else 0)

    def packed(self) -> PackedMatrix:
        rows, columns = self.shape
        return PackedMatrix("F32", rows, columns, self.tensor(torch.float32).numpy().reshape(-1).view("u1"))

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.values is not None
        heads, value, latent = self.values.shape
        plain = self.shape[0] // heads - value
        keys = StoredTensor(self.name, self.quant, (heads, latent, plain), self.data).tensor(dtype)
        return torch.cat([keys.transpose(1, 2), self.values.tensor(dtype)], 1).reshape(self.shape)


def join_latent_tensors(path: str, stored: dict[str, StoredTensor]) -> None:
    """Put one tensor in the place of each such pair of `stored`, by GGUF name. Raises CheckpointError."""
    for match in [match for name in stored if (match := _KEYS.fullmatch(name))]:
        keys = stored.pop(match[0])
        values = stored.pop(f"{match[1]}.attn_v_b.weight", None)
        if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
            raise CheckpointError(f"{path}: tensor {match[0]!r} and attn_v_b beside it must have three dimensions")
        (heads, latent, plain), (others, value, columns) = keys.shape, values.shape
        if (heads, latent) != (others, columns):
            raise CheckpointError(f"{path}: tensor {match[0]!r} is {list(keys.shape)}, attn_v_b {list(values.shape)}")
        name = f"{match[1]}.attn_kv_b.weight"
        shape = (heads * (plain + value), latent)
        stored[name] = JoinedTensor(name, keys.quant, shape, keys.data, values=values)
