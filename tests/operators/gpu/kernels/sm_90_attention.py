"""Compiles the attention kernels for an H200, for the shapes and types that models have: see sm_90."""

import sys

import torch
from sm_90 import compiling

from ktqueue.operators.gpu.kernels import attention_decode as triton_decode
from ktqueue.operators.gpu.kernels import attention_latent as triton_latent
from ktqueue.operators.gpu.kernels import attention_prefill as triton_prefill
from ktqueue.operators.gpu.kernels.attention_blocks import Tables

CASES = (
    (32, 4, 128, 16, torch.bfloat16, torch.bfloat16, 4096),
    (16, 8, 256, 16, torch.bfloat16, torch.float8_e4m3fn, 0),
    (8, 8, 64, 64, torch.float32, torch.float32, 0),
)
"""heads, key/value heads, head_dim, page size, types of queries and cache, window"""


def attention() -> None:
    """Decode rows, all of a step or some, and tiles of chunks."""
    indices = torch.zeros(16, dtype=torch.int32)
    chunks, decode = Tables(indices, indices, indices, indices), Tables(indices, indices, indices)
    for heads, kv_heads, head_dim, page_size, dtype, cache, window in CASES:
        query = torch.zeros(3, heads, head_dim, dtype=dtype)
        keys = torch.zeros(4, page_size, kv_heads, head_dim).to(cache)
        workspace = torch.zeros(triton_decode.workspace_bytes(3, heads, head_dim, 8), dtype=torch.uint8)
        common = {"scaling": 0.1, "window": window}
        for tables, rows in ((decode, None), (chunks, indices)):
            some = {"items": 3, "rows": rows, "splits": 8}
            triton_decode.decode(query, keys, keys, tables, query, workspace, **some, **common)
        triton_prefill.prefill(query, keys, keys, chunks, query, tiles=indices.view(-1, 2), **common)


def latent() -> None:
    """DeepSeek's latents, with one share of the keys and with many."""
    indices = torch.zeros(16, dtype=torch.int32)
    for heads, dtype, cache in (
        (16, torch.bfloat16, torch.bfloat16),
        (128, torch.bfloat16, torch.float8_e4m3fn),
        (16, torch.float32, torch.float32),
    ):
        query, out = torch.zeros(3, heads, 576, dtype=dtype), torch.zeros(3, heads, 512, dtype=dtype)
        keys = torch.zeros(4, 16, 1, 576).to(cache)
        for splits, row_of in ((1, indices), (8, None)):
            workspace = torch.zeros(triton_latent.workspace_bytes(3, heads, 512, splits), dtype=torch.uint8)
            lists = {"row_of": row_of, "page_starts": indices, "pages": indices, "contexts": indices}
            triton_latent.attend(query, keys, out, workspace, splits=splits, scaling=0.1, **lists)


if __name__ == "__main__":
    with compiling() as names:
        attention()
        latent()
    sys.stdout.write(" ".join(names))
