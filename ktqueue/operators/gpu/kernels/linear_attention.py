"""Linear attention by the gated delta rule on a device: the convolution, the rule, the gated norm; a launch each.

The twin of csrc/model/linear_attention.cpp, with the same layout of states. Tokens of a sequence follow one another, so
a token's numbers do not depend on the chunks of its prompt. No host sync: it can be captured in a CUDA graph.

In a step of one token a row, a row may continue the row before it (docs/adr/0045). Such rows are a chain. The program
of its first row computes all their tokens and keeps the state after each of them.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ktqueue.operators.gpu.kernels.operation import check_fits, runs_kernel, tl, triton
from ktqueue.operators.linear_attention import LinearAttentionShape

_MOST_CHUNKS = 64  # programs that share the tokens of a row
_COLUMNS = 32  # of a head's state that a program, a single warp, holds in registers
_STAGES = 3  # tokens that are read ahead of the rule


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step, and where their states are. starts: [rows + 1] int32; contexts, sources, targets: [rows]
    int32. See StepContext."""

    starts: torch.Tensor
    contexts: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor


@triton.jit
def _convolve(
    x, weights, old, t, channel, inside, continues, stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """The convolution's output of some channels at token t of a row, float32 numbers of x's type."""
    total = channel * 0.0
    for tap in tl.static_range(TAPS):
        place = t + tap - (TAPS - 1)
        known = tl.load(x + place * stride + channel, mask=inside & (place >= 0), other=0.0).to(tl.float32)
        kept = tl.load(old + (place + TAPS - 1) * CHANNELS + channel, mask=continues & (place < 0), other=0.0)
        total += tl.load(weights + tap * CHANNELS + channel, mask=inside, other=0.0) * (known + kept)
    return (total * tl.sigmoid(total)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _keep(
    x, old, new, tokens, channel, inside, continues, stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """Write the inputs of the convolution that the row's next step needs. They may take the place of the old ones."""
    for i in tl.static_range(TAPS - 1):
        place = tokens + i - (TAPS - 1)
        known = tl.load(x + place * stride + channel, mask=inside & (place >= 0), other=0.0).to(tl.float32)
        kept = tl.load(old + (place + TAPS - 1) * CHANNELS + channel, mask=continues & (place < 0), other=0.0)
        tl.store(new + i * CHANNELS + channel, known + kept, mask=inside)


@triton.jit
def _chain(sources, targets, row, rows):
    """How many rows of one token the chain that begins with `row` has; 0: it continues another row."""
    source = tl.load(sources + row)
    continues = (source != tl.load(targets + row)) & (row > 0) & (source == tl.load(targets + tl.maximum(row - 1, 0)))
    count = 1 - continues.to(tl.int32)
    follows = (count > 0) & (row + 1 < rows)
    while follows:
        source = tl.load(sources + row + count)
        follows = (source == tl.load(targets + row + count - 1)) & (source != tl.load(targets + row + count))
        count += follows.to(tl.int32)
        follows = follows & (row + count < rows)
    return count


@triton.jit
def _prepare(
    x, scalars, weights, decay_rates, decay_biases, recent, mixed, factors, products,
    starts, contexts, sources, targets, stride, chunks, rows,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, CHAINS: tl.constexpr,
):  # fmt: skip
    """All that a token gives the rule before the state is known, which many programs compute at once.

    One program for a key head with its query, or for a value head, and one of `chunks` parts of a row. The first part
    has all tokens that read the row's old inputs.
    """
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    part = tl.program_id(2)
    start = tl.load(starts + row).to(tl.int64)
    tokens = tl.load(starts + row + 1) - tl.load(starts + row)
    continues = tl.load(contexts + row) > tokens
    steps = 1  # after how many of the row's parts the inputs are kept: after all its tokens, or each row of a chain
    if CHAINS:
        tokens = _chain(sources, targets, row, rows)
        steps = tokens
    old = recent + tl.load(sources + row).to(tl.int64) * ((TAPS - 1) * CHANNELS)
    length = tl.maximum(tl.cdiv(tokens, chunks), TAPS - 1)
    first = chunk * length
    last = tl.minimum(first + length, tokens)
    source = x + start * stride
    if part < KEY_HEADS:
        element = tl.arange(0, KEYS)
        inside = element < KEY_DIM
        both = inside & continues
        query = part * KEY_DIM + element
        key = query + KEY_HEADS * KEY_DIM
        for t in range(first, last):
            q = _convolve(source, weights, old, t, query, inside, both, stride, CHANNELS, TAPS)
            k = _convolve(source, weights, old, t, key, inside, both, stride, CHANNELS, TAPS)
            q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * tl.rsqrt(KEY_DIM * 1.0)
            k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
            line = mixed + (start + t) * CHANNELS
            tl.store(line + query, q, mask=inside)
            tl.store(line + key, k, mask=inside)
            tl.store(products + (start + t) * KEY_HEADS + part, tl.sum(q * k, axis=0))
        if chunk == 0:
            for i in range(steps):  # the last row of a chain first: the first may overwrite the old inputs
                kept = tokens - i
                new = recent + tl.load(targets + row + steps - 1 - i).to(tl.int64) * ((TAPS - 1) * CHANNELS)
                _keep(source, old, new, kept, query, inside, both, stride, CHANNELS, TAPS)
                _keep(source, old, new, kept, key, inside, both, stride, CHANNELS, TAPS)
    else:
        head = part - KEY_HEADS
        column = tl.arange(0, VALUES)  # names of their own: a kernel's variable has one type in both branches
        wide = column < VALUE_DIM
        known = wide & continues
        value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        rate = tl.load(decay_rates + head)
        bias = tl.load(decay_biases + head)
        for t in range(first, last):
            v = _convolve(source, weights, old, t, value, wide, known, stride, CHANNELS, TAPS)
            tl.store(mixed + (start + t) * CHANNELS + value, v, mask=wide)
            a = tl.load(scalars + (start + t) * stride + head).to(tl.float32) + bias
            b = tl.load(scalars + (start + t) * stride + VALUE_HEADS + head).to(tl.float32)
            a = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            line = factors + (start + t) * (2 * VALUE_HEADS) + head
            tl.store(line, tl.exp(rate * a))
            tl.store(line + VALUE_HEADS, tl.sigmoid(b))
        if chunk == 0:
            for i in range(steps):
                kept = tokens - i
                new = recent + tl.load(targets + row + steps - 1 - i).to(tl.int64) * ((TAPS - 1) * CHANNELS)
                _keep(source, old, new, kept, value, wide, known, stride, CHANNELS, TAPS)


@triton.jit
def _delta_rule(
    mixed, factors, products, states, out, starts, contexts, sources, targets, rows,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, TILED: tl.constexpr, STAGES: tl.constexpr, CHAINS: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK columns of the state of one head of a row, token after token.

    Both sums over keys are of the state before the token, so that they need not wait for one another.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    key = tl.arange(0, KEYS)
    wide = column < VALUE_DIM
    tall = key < KEY_DIM
    both = tall[:, None] & wide[None, :]
    start = tl.load(starts + row).to(tl.int64)
    tokens = tl.load(starts + row + 1) - tl.load(starts + row)
    continues = tl.load(contexts + row) > tokens
    if CHAINS:
        tokens = _chain(sources, targets, row, rows)
    place = key[:, None] * VALUE_DIM + column[None, :]
    size = KEY_DIM * VALUE_DIM
    source = (tl.load(sources + row).to(tl.int64) * VALUE_HEADS + head) * size
    state = tl.load(states + source + place, mask=both & continues, other=0.0)
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    width = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    queries = mixed + start * width + key_head * KEY_DIM + key
    values = mixed + start * width + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    factors += start * (2 * VALUE_HEADS) + head
    products += start * KEY_HEADS + key_head
    out += (start * VALUE_HEADS + head) * VALUE_DIM + column
    for t in tl.range(0, tokens, num_stages=STAGES):
        q = tl.load(queries + t * width, mask=tall, other=0.0)
        k = tl.load(queries + t * width + KEY_HEADS * KEY_DIM, mask=tall, other=0.0)
        v = tl.load(values + t * width, mask=wide, other=0.0)
        factor = tl.load(factors + t * (2 * VALUE_HEADS))
        rate = tl.load(factors + t * (2 * VALUE_HEADS) + VALUE_HEADS)
        state *= factor
        change = (v - tl.sum(state * k[:, None], axis=0)) * rate
        result = tl.sum(state * q[:, None], axis=0) + tl.load(products + t * KEY_HEADS) * change
        state += k[:, None] * change[None, :]
        tl.store(out + t * (VALUE_HEADS * VALUE_DIM), result, mask=wide)
        if CHAINS:
            target = (tl.load(targets + row + t).to(tl.int64) * VALUE_HEADS + head) * size
            tl.store(states + target + place, state, mask=both)
    if not CHAINS:
        target = (tl.load(targets + row).to(tl.int64) * VALUE_HEADS + head) * size
        tl.store(states + target + place, state, mask=both)


@triton.jit
def _gated_norm(x, gate, weight, out, stride, epsilon, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """One program for a head of a token."""
    token = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    element = (token * HEADS + head) * DIM + column
    values = tl.load(x + element, mask=inside, other=0.0)
    z = tl.load(gate + token * stride + head * DIM + column, mask=inside, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / DIM + epsilon)
    values *= tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + element, (values * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=inside)


def linear_attention(
    projected: torch.Tensor,
    shape: LinearAttentionShape,
    *,
    convolution: torch.Tensor,
    decay_rates: torch.Tensor,
    decay_biases: torch.Tensor,
    norm: torch.Tensor,
    epsilon: float,
    recent: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Attend linearly: [tokens, values] in the dtype of `projected`. Reads and writes the states of `rows`.

    projected [tokens, channels + values + 2 * value_heads]: query, key, value, gate, decay and rate of a token one
    after the other. convolution [taps, channels], decay_rates, decay_biases [value_heads], norm [value_dim]: float32.
    recent [slots, taps - 1, channels], states [slots, value_heads, key_dim, value_dim]: float32, one layer's. A row
    that reads what the row before it writes continues it; then all rows must have one token. The rule is computed in
    float32; its input is rounded to the dtype after the convolution, and its output after the norm.
    Raises ValueError for shapes that do not fit.
    """
    channels, values, heads = shape.channels, shape.values, shape.value_heads
    fits = projected.shape[1] == channels + values + 2 * heads and projected.is_contiguous()
    fits &= convolution.shape == (shape.taps, channels) and norm.shape == (shape.value_dim,)
    fits &= recent.shape[1:] == (shape.taps - 1, channels) and recent.is_contiguous() and states.is_contiguous()
    fits &= states.shape[1:] == (heads, shape.key_dim, shape.value_dim)
    fits &= rows.sources.shape == rows.targets.shape == rows.contexts.shape
    check_fits(fits, "linear_attention", projected=projected, convolution=convolution, recent=recent, states=states)
    tokens, count = len(projected), len(rows.contexts)
    gate, scalars = projected[:, channels : channels + values], projected[:, channels + values :]
    out = projected.new_empty(tokens, values)
    if not runs_kernel(projected):
        mixed = _convolution_twin(projected[:, :channels], convolution, recent, rows).to(projected.dtype).float()
        read = _delta_twin(mixed, scalars.float(), decay_rates, decay_biases, states, shape, rows)
        read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + epsilon) * norm
        z = gate.float().view(tokens, heads, -1)
        return out.copy_((read * torch.nn.functional.silu(z)).flatten(1))
    if tokens == 0:
        return out
    stride = projected.stride(0)
    where = (rows.starts, rows.contexts, rows.sources, rows.targets)
    numbers: dict[str, Any] = {"dtype": torch.float32, "device": projected.device}
    mixed = torch.empty(tokens, channels, **numbers)
    factors, products = torch.empty(tokens, 2 * heads, **numbers), torch.empty(tokens, shape.key_heads, **numbers)
    sizes = {
        "KEY_HEADS": shape.key_heads, "VALUE_HEADS": heads, "KEY_DIM": shape.key_dim, "VALUE_DIM": shape.value_dim,
        "KEYS": triton.next_power_of_2(shape.key_dim),
    }  # fmt: skip
    width = triton.next_power_of_2(shape.value_dim)
    chunks = min(_MOST_CHUNKS, max(1, tokens // max(count, 1)))
    chains = tokens == count
    _prepare[(count, chunks, shape.key_heads + heads)](
        projected, scalars, convolution, decay_rates, decay_biases, recent, mixed, factors, products, *where, stride,
        chunks, count, **sizes, TAPS=shape.taps, VALUES=width, CHAINS=chains, num_warps=1,
    )  # fmt: skip
    read = torch.empty(tokens, values, **numbers)
    block = min(_COLUMNS, width)
    _delta_rule[(count, heads, triton.cdiv(shape.value_dim, block))](
        mixed, factors, products, states, read, *where, count,
        **sizes, BLOCK=block, TILED=shape.tiled, STAGES=_STAGES, CHAINS=chains, num_warps=1,
    )  # fmt: skip
    _gated_norm[(tokens * heads,)](
        read, gate, norm, out, stride, epsilon,
        HEADS=heads, DIM=shape.value_dim, BLOCK=triton.next_power_of_2(shape.value_dim), num_warps=1,
    )  # fmt: skip
    return out


def _convolution_twin(x: torch.Tensor, weights: torch.Tensor, recent: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """The twin of the convolution in _prepare: x [tokens, channels] -> float32."""
    parts = []
    for row, (first, last) in enumerate(zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), strict=True)):
        before = recent[int(rows.sources[row])] * bool(rows.contexts[row] > last - first)
        inputs = torch.cat([before, x[first:last].float()])
        total = sum(inputs[tap : tap + last - first] * weights[tap] for tap in range(len(weights)))
        parts.append(torch.nn.functional.silu(torch.as_tensor(total)))
        recent[int(rows.targets[row])] = inputs[last - first :]
    return torch.cat(parts)


def _delta_twin(
    mixed: torch.Tensor,
    scalars: torch.Tensor,
    decay_rates: torch.Tensor,
    decay_biases: torch.Tensor,
    states: torch.Tensor,
    shape: LinearAttentionShape,
    rows: StateRows,
) -> torch.Tensor:
    """The twin of _delta_rule: mixed [tokens, channels] -> [tokens, value_heads, value_dim] float32."""
    tokens = len(mixed)
    query, key, value = torch.split(mixed, [shape.keys, shape.keys, shape.values], -1)
    heads = torch.arange(shape.value_heads)
    key_heads = heads % shape.key_heads if shape.tiled else heads // (shape.value_heads // shape.key_heads)
    unit = []
    for x in (query, key):
        x = x.reshape(tokens, shape.key_heads, shape.key_dim)
        unit.append((x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6))[:, key_heads])
    query, key, value = unit[0] * shape.key_dim**-0.5, unit[1], value.reshape(tokens, shape.value_heads, -1)
    decay, rate = scalars.chunk(2, dim=-1)
    kept = torch.exp(decay_rates * torch.nn.functional.softplus(decay + decay_biases))
    read = torch.empty_like(value)
    for row, (first, last) in enumerate(zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), strict=True)):
        state = states[int(rows.sources[row])] * bool(rows.contexts[row] > last - first)
        for t in range(first, last):
            state = state * kept[t, :, None, None]
            change = (value[t] - (state * key[t, :, :, None]).sum(1)) * rate[t, :, None].sigmoid()
            state = state + key[t, :, :, None] * change[:, None]
            read[t] = (state * query[t, :, :, None]).sum(1)
        states[int(rows.targets[row])] = state
    return read
