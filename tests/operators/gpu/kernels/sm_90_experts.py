"""Compiles the kernels of experts with few tokens for an H200, as steps of 1 and of 64 rows launch them: see sm_90. And
those that fetch experts."""

import sys

import torch
from sm_90 import compiling

from ktqueue.operators.gpu.kernels import fetch as triton_fetch
from ktqueue.operators.gpu.kernels import few_rows as triton_few
from ktqueue.operators.gpu.kernels.expert_products import ExpertRecord

EXPERTS, SLOTS, RECORD = 128, 8, ExpertRecord("Q4_K", "Q4_K", "Q6_K", 2048, 768)


def experts(tokens: int) -> None:
    """All three launches."""
    pool, offsets = torch.zeros(64, dtype=torch.uint8), torch.zeros(EXPERTS, dtype=torch.int64)
    ids, weights = torch.zeros(tokens, SLOTS, dtype=torch.int64), torch.zeros(tokens, SLOTS)
    x, pairs = triton_few.prepare(torch.zeros(tokens, RECORD.hidden, dtype=torch.bfloat16), ids, offsets)
    quants = (RECORD.gate, RECORD.up)
    mid = triton_few.gate_up(pool, offsets, ids, x, pairs, quants, RECORD.intermediate, "silu")
    triton_few.down(pool, offsets, ids, mid, pairs, weights, RECORD.down, RECORD.hidden, RECORD.down_start)


def fetched(tokens: int, slots: int) -> None:
    """Both launches."""
    ids, sources = torch.zeros(tokens, SLOTS, dtype=torch.int64), torch.zeros(slots, 2, dtype=torch.int64)
    offsets, addresses = torch.zeros(EXPERTS, dtype=torch.int64), torch.zeros(EXPERTS, 2, dtype=torch.int64)
    triton_fetch.divide(ids, offsets, addresses, 0.3, 0, RECORD.bytes, offsets, sources, ids)
    memory = torch.zeros(64, dtype=torch.uint8)
    triton_fetch.fetch(sources, torch.zeros(2, 2, dtype=torch.int64), 1 << 20, memory, 0, RECORD.bytes)


if __name__ == "__main__":
    with compiling() as names:
        experts(1)
        experts(64)
        fetched(1, 2)
        fetched(64, 38)
    sys.stdout.write(" ".join(names))
