"""Between the products of latent attention, in one launch: the token's key to the paged cache, and its query.

The key's latent is normalised, the key and the query are rotated, and for few tokens the query is multiplied by the
matrix that expands latents to keys. No host sync: it can be captured in a CUDA graph.
"""

import torch

from ktqueue.operators.gpu.attention.triton_blocks import padded, precision
from ktqueue.operators.gpu.kernels.operation import (
    check_fits,
    launch_options,
    runs_kernel,
    tl,
    triton,
    wait_for_previous,
)
from ktqueue.operators.gpu.kernels.rope import store_rounded
from ktqueue.operators.kv_cache import store
from ktqueue.operators.latent_shape import LatentShape, absorb_query, make_key, rotate_query

FEW_TOKENS = 64
"""Up to here the launch also absorbs queries. For more tokens, torch's product is launched beside it."""
_COLUMNS = 64
"""Columns of an absorbed query that a program computes: 16 heads of 512 columns then fill a GPU."""
_HEADS = 16
"""Heads of a token that a program rotates."""


@triton.jit
def _rotated(
    source, target, cosine, sine, mask, factor, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Rotate columns. source, target: pointers to the first one; cosine, sine: of the pairs [1, PAIRS]; factor: see
    store_rounded."""
    pair = tl.arange(0, cosine.shape[1])[None, :]
    first = tl.load(source + (2 * pair if INTERLEAVED else pair), mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + (2 * pair + 1 if INTERLEAVED else pair + ROTARY // 2), mask=mask, other=0.0)
    second = second.to(tl.float32)
    store_rounded(target + pair, first * cosine - second * sine, mask, factor, dtype)
    store_rounded(target + pair + ROTARY // 2, second * cosine + first * sine, mask, factor, dtype)


@triton.jit
def _absorb(
    query, up, out, program, tokens, query_stride, up_stride,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTARY: tl.constexpr, LATENT: tl.constexpr, PLAIN_WIDTH: tl.constexpr,
    PARTS: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Multiply one head of all tokens, M or less, by COLUMNS columns of its matrix."""
    head = program // PARTS
    column = program % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, PLAIN_WIDTH)
    inside = (row < PLAIN)[:, None] & (column < LATENT)[None, :]
    weights = tl.load(up + head * up_stride + row[:, None] * LATENT + column[None, :], mask=inside, other=0.0)
    wait_for_previous(WAITS)  # while weights arrive, which no kernel of a step writes
    token = tl.arange(0, M)
    given = token.to(tl.int64)[:, None] * query_stride + head * (PLAIN + ROTARY) + row[None, :]
    plain = tl.load(query + given, mask=(token < tokens)[:, None] & (row < PLAIN)[None, :], other=0.0)
    product = tl.dot(plain, weights, input_precision=PRECISION)
    cells = (token.to(tl.int64) * HEADS + head)[:, None] * (LATENT + ROTARY) + column[None, :]
    mask = (token < tokens)[:, None] & (column < LATENT)[None, :]
    tl.store(out + cells, product.to(query.dtype.element_ty), mask=mask)


@triton.jit
def _write_key(
    key, norm, cache, cosine, sine, epsilon, factor,
    ROTARY: tl.constexpr, LATENT: tl.constexpr, LATENT_WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Normalise the latent of one token and rotate its key. cosine, sine: [1, PAIRS]."""
    dtype: tl.constexpr = key.dtype.element_ty
    column = tl.arange(0, LATENT_WIDTH)
    inside = column < LATENT
    x = tl.load(key + column, mask=inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / LATENT + epsilon)
    scales = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    store_rounded(cache + column, x.to(dtype).to(tl.float32) * scales, inside, factor, dtype)
    real = tl.arange(0, cosine.shape[1])[None, :] < ROTARY // 2
    _rotated(key + LATENT, cache + LATENT, cosine, sine, real, factor, ROTARY, INTERLEAVED, dtype)


@triton.jit(do_not_specialize=["tokens"])
def _latent_inputs(
    query, key, norm, up, cosine, sine, positions, slot_mapping, out, cache, tokens, query_stride, key_stride,
    up_stride, epsilon, factor,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTARY: tl.constexpr, LATENT: tl.constexpr, PLAIN_WIDTH: tl.constexpr,
    PAIRS_WIDTH: tl.constexpr, LATENT_WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, ABSORBS: tl.constexpr,
    COPIES: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, TABLE: tl.constexpr,
    PRECISION: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """First, if it ABSORBS, the programs of COLUMNS columns of a head. Then for each token one program for each GROUP
    of its heads, which are rotated, and one for its key. COPIES: the other columns of heads are copied before the
    rotated ones. Otherwise these come behind LATENT columns."""
    PARTS: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    PRODUCTS: tl.constexpr = HEADS * PARTS if ABSORBS else 0
    GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    FIRST: tl.constexpr = PLAIN if COPIES else LATENT
    program = tl.program_id(0)
    if ABSORBS:
        if program < PRODUCTS:
            _absorb(
                query, up, out, program, tokens, query_stride, up_stride,
                HEADS, PLAIN, ROTARY, LATENT, PLAIN_WIDTH, PARTS, M, COLUMNS, PRECISION, WAITS,
            )  # fmt: skip
    if program >= PRODUCTS:
        wait_for_previous(WAITS)
        token = ((program - PRODUCTS) // (GROUPS + 1)).to(tl.int64)
        group = (program - PRODUCTS) % (GROUPS + 1)
        pair = tl.arange(0, PAIRS_WIDTH)[None, :]
        real = pair < ROTARY // 2
        position = tl.load(positions + token)
        c = tl.load(cosine + position * TABLE + pair, mask=real, other=0.0)
        s = tl.load(sine + position * TABLE + pair, mask=real, other=0.0)
        if group == GROUPS:
            slot = tl.load(slot_mapping + token) * (LATENT + ROTARY)
            _write_key(
                key + token * key_stride, norm, cache + slot, c, s, epsilon, factor,
                ROTARY, LATENT, LATENT_WIDTH, INTERLEAVED,
            )  # fmt: skip
        else:
            head = group * GROUP + tl.arange(0, GROUP)[:, None]
            source = query + token * query_stride + head * (PLAIN + ROTARY)
            target = out + (token * HEADS + head) * (FIRST + ROTARY)
            mask = (head < HEADS) & real
            _rotated(source + PLAIN, target + FIRST, c, s, mask, 1.0, ROTARY, INTERLEAVED, query.dtype.element_ty)
            if COPIES:
                column = tl.arange(0, PLAIN_WIDTH)[None, :]
                inside = (head < HEADS) & (column < PLAIN)
                tl.store(target + column, tl.load(source + column, mask=inside, other=0.0), mask=inside)


def latent_query_append(
    query: torch.Tensor,
    key: torch.Tensor,
    shape: LatentShape,
    *,
    norm: torch.Tensor,
    key_up: torch.Tensor | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """Write the keys of one layer to the cache and return its queries: latent_shape's make_key, and absorb_query or,
    without `key_up`, rotate_query.

    query [tokens, heads * (plain + rotary)] and key [tokens, latent + rotary], both as products leave them; their rows
    may be strided. norm [latent], of the key's latent. key_up: None, or [heads, plain, latent], whose heads may be
    strided. cosine, sine: [positions, rotary / 2] float32, indexed by `positions` [tokens] int64. cache [pages,
    page_size, 1, latent + rotary] is written at `slot_mapping` [tokens] int64 in its own dtype; numbers of
    float8_e4m3fn are divided by `scale` and saturate at +-448. Returns [tokens, heads, latent + rotary], or [tokens,
    heads, plain + rotary] without key_up, in the dtype of `query`. Raises ValueError for shapes that do not fit.
    """
    tokens, heads, width = len(query), shape.heads, shape.plain + shape.rotary
    fits = query.shape == (tokens, heads * width) and key.shape == (tokens, shape.key)
    fits &= cache.shape[2:] == (1, shape.key) and cache.is_contiguous() and norm.shape == (shape.latent,)
    fits &= key_up is None or (key_up.shape == (heads, shape.plain, shape.latent) and key_up[0].is_contiguous())
    fits &= cosine.shape == sine.shape and cosine.shape[1] * 2 == shape.rotary and cosine.stride() == sine.stride()
    fits &= positions.shape == slot_mapping.shape == (tokens,) and query.stride(1) == key.stride(1) == 1
    check_fits(fits, "latent_query_append", query=query, key=key, norm=norm, key_up=key_up, cosine=cosine, cache=cache)
    if not runs_kernel(query):
        c, s = cosine[positions], sine[positions]
        store(cache.flatten(0, 1), slot_mapping, make_key(key, norm, c, s, shape)[:, None], scale)
        return rotate_query(query, c, s, shape) if key_up is None else absorb_query(query, key_up, c, s, shape)
    absorbs = key_up is not None and tokens <= FEW_TOKENS
    out = query.new_empty(tokens, heads, width if key_up is None else shape.key)
    group = min(triton.next_power_of_2(heads), _HEADS)
    columns = min(padded(shape.latent), _COLUMNS)
    products = heads * triton.cdiv(shape.latent, columns) if absorbs else 0
    if tokens:
        _latent_inputs[(products + tokens * (triton.cdiv(heads, group) + 1),)](
            query, key, norm, key_up, cosine, sine, positions, slot_mapping, out, cache, tokens, query.stride(0),
            key.stride(0), 0 if key_up is None else key_up.stride(0), shape.epsilon, 1 / scale,
            HEADS=heads,
            PLAIN=shape.plain,
            ROTARY=shape.rotary,
            LATENT=shape.latent,
            PLAIN_WIDTH=padded(shape.plain),
            PAIRS_WIDTH=triton.next_power_of_2(shape.rotary // 2),
            LATENT_WIDTH=padded(shape.latent),
            INTERLEAVED=shape.interleaved,
            ABSORBS=absorbs,
            COPIES=key_up is None,
            M=padded(tokens) if absorbs else 16,
            COLUMNS=columns,
            GROUP=group,
            TABLE=cosine.stride(0),
            PRECISION=precision(query.dtype),
            **launch_options(),
            num_warps=4,
        )  # fmt: skip
    if key_up is not None and not absorbs:
        plain = query.view(tokens, heads, width)[..., : shape.plain].transpose(0, 1)
        torch.bmm(plain, key_up, out=out[..., : shape.latent].transpose(0, 1))
    return out
