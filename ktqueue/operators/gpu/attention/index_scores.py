"""Scores of sparse attention's indexer: how much each token wants each earlier key. One launch for any mix of rows."""

import torch

from ktqueue.operators.gpu.attention.triton_blocks import padded, precision
from ktqueue.operators.gpu.kernels.operation import runs_kernel, tl, triton

_BLOCK = 64


@triton.jit
def _index_scores(
    query, weights, keys, pages, seen, out, width, pages_stride, page_stride, slot_stride,
    HEADS: tl.constexpr, KEY: tl.constexpr, HEADS_WIDTH: tl.constexpr, KEY_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK keys of one token. Blocks that the token does not see are only filled."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    index = first + tl.arange(0, BLOCK)
    limit = tl.load(seen + token)
    target = out + token * width + index
    if first >= limit:
        tl.store(target, tl.full([BLOCK], float("-inf"), tl.float32), mask=index < width)
    else:
        head = tl.arange(0, HEADS_WIDTH)
        column = tl.arange(0, KEY_WIDTH)
        exists = index < limit
        cells = (token * HEADS + head)[:, None] * KEY + column[None, :]
        inside = (column < KEY)[None, :]
        q = tl.load(query + cells, mask=(head < HEADS)[:, None] & inside, other=0.0)
        factor = tl.load(weights + token * HEADS + head, mask=head < HEADS, other=0.0)
        page = tl.load(pages + token * pages_stride + index // PAGE_SIZE, mask=exists, other=0)
        slots = keys + (page.to(tl.int64) * page_stride + (index % PAGE_SIZE) * slot_stride)[:, None]
        k = tl.load(slots + column[None, :], mask=exists[:, None] & inside, other=0.0).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.sum(tl.maximum(products, 0.0) * factor[:, None], 0)
        tl.store(target, tl.where(exists, scores, float("-inf")), mask=index < width)


def index_scores(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, pages: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Sum over heads of weight * max(0, query * key), for each token and each key of its pages.

    query [tokens, heads, key]; weights [tokens, heads] float32; keys [pages, page_size, key]; pages [tokens, n] int32,
    those of each token's row; seen [tokens]: keys that the token sees. Returns [tokens, n * page_size] float32, minus
    infinity for keys that it does not see.
    """
    tokens, heads, columns = query.shape
    page_size = keys.shape[1]
    width = pages.shape[1] * page_size
    if not runs_kernel(query):
        rows = []
        for token in range(tokens):
            found = keys[pages[token].long()].flatten(0, 1).float()
            rows.append(weights[token] @ torch.relu(query[token].float() @ found.T))
        places = torch.arange(width, device=query.device)
        return torch.stack(rows).masked_fill(places >= seen[:, None], -torch.inf)
    out = query.new_empty(tokens, width, dtype=torch.float32)
    query, weights = query.contiguous(), weights.contiguous()
    _index_scores[(tokens, triton.cdiv(width, _BLOCK))](
        query, weights, keys, pages, seen, out, width, pages.stride(0), keys.stride(0), keys.stride(1),
        HEADS=heads,
        KEY=columns,
        HEADS_WIDTH=padded(heads),
        KEY_WIDTH=padded(columns),
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        PRECISION=precision(query.dtype),
        num_warps=4,
    )  # fmt: skip
    return out
