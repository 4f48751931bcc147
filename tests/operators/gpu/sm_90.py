"""Compiles what the launchers launch for an H200 (sm_90, down to machine code), on a machine without a GPU.

`python sm_90.py TOPIC` compiles the kernels of one topic and prints their names: so tests find what the interpreter
accepts and the compiler refuses. A process that compiles cannot interpret, so tests start it as another process.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu import expert_tiles as benchmark
from benchmarks.gpu.latents import TILES
from ktqueue.operators.gpu.attention import latent, triton_decode, triton_prefill
from ktqueue.operators.gpu.attention.expanded import ExpandedRows, attend_expanded
from ktqueue.operators.gpu.attention.expanded_prompts import KeyTiles, expand_keys
from ktqueue.operators.gpu.attention.index_scores import index_scores
from ktqueue.operators.gpu.attention.latent_inputs import latent_query_append
from ktqueue.operators.gpu.attention.triton_blocks import DecodeRows, Tables
from ktqueue.operators.gpu.kernels import decoded_experts, expert_few_pairs, expert_int8, fetch
from ktqueue.operators.gpu.kernels.activation import gated
from ktqueue.operators.gpu.kernels.candidates import Filters, draw_from_candidates
from ktqueue.operators.gpu.kernels.expert_pairs import ExpertBiases, ExpertPairs, sort_pairs
from ktqueue.operators.gpu.kernels.few_rows_router import few_rows_route
from ktqueue.operators.gpu.kernels.greedy import greedy
from ktqueue.operators.gpu.kernels.linear import few_rows_gated, few_rows_linear
from ktqueue.operators.gpu.kernels.linear_attention import StateRows, linear_attention
from ktqueue.operators.gpu.kernels.norm import RmsNorm, add_rms_norm, in_order
from ktqueue.operators.gpu.kernels.operation import dependent_launches, kernels_on_any_device
from ktqueue.operators.gpu.kernels.panel_layout import FLOAT_PRODUCTS, ExpertRecord
from ktqueue.operators.gpu.kernels.panel_matrix import PanelMatrix, multiply_few
from ktqueue.operators.gpu.kernels.rope import qk_norm_rope_append
from ktqueue.operators.gpu.kernels.router import PLAIN, Scoring, route
from ktqueue.operators.gpu.kernels.take_rows import send_rows
from ktqueue.operators.latent_shape import LatentShape
from ktqueue.operators.linear_attention import LinearAttentionShape
from ktqueue.operators.native import QUANTS, SILU, GateFacts
from ktqueue.operators.step import ScoreOptions


class _Driver:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling() -> Iterator[list[str]]:
    """Launches compile only, whatever device their tensors are on. Gives the names of the kernels, as they come, with
    "+volatile" behind those that have such loads, and "+waits" behind those that wait for the kernel before."""
    names: list[str] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        assert kernel.asm["cubin"]
        waits = "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx
        names.append(self.fn.__name__ + "+volatile" * ("ld.volatile" in ptx) + "+waits" * waits)
        return kernel

    driver.set_active(_Driver())
    JITFunction.run = compile_only
    with kernels_on_any_device():
        yield names
    JITFunction.run = run


def between_matrices() -> None:
    """Every kernel between matrix products, for shapes and types that models have."""
    for dtype, hidden, slots in ((torch.bfloat16, 2048, 8), (torch.float32, 2880, 4)):
        rows, ids = torch.zeros(2, hidden, dtype=dtype), torch.zeros(2, slots, dtype=torch.int64)
        wide, nothing = rows.float(), dict[str, Any]()
        everything = {"added": wide, "partials": torch.zeros(2, slots, hidden), "shared": rows, "copy": wide}
        gated_shared = {**everything, "shared_gate": rows[:, :1].contiguous()}
        sent = send_rows(rows, ids, ids[0], wide)
        for options in (nothing, gated_shared, {**everything, "scale": 0.5, "added_rows": sent}):
            add_rms_norm(rows, rows[0], 1e-6, **options)
        add_rms_norm(rows, rows[0], 1e-6, added=rows, ordered=rows if dtype == torch.bfloat16 else None)
    for activation in ("silu", "gelu", "gelu_tanh"):
        gated(activation, torch.zeros(2, 6144, dtype=torch.bfloat16))

    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    for heads, kv_heads, head_dim, norm, clip, tokens, dtype, cache in (
        (32, 4, 128, "head", 0.0, 2, bf16, bf16),
        (32, 4, 128, "head", 0.0, 200, bf16, fp8),
        (32, 8, 128, "after", 0.0, 200, bf16, fp8),
        (32, 8, 128, "not rotated", 0.0, 2, bf16, bf16),
        (16, 16, 80, "whole", 8.0, 2, torch.float32, torch.float32),
        (16, 16, 128, "whole", 8.0, 200, bf16, fp8),
        (8, 8, 96, "", 0.0, 2, torch.float16, torch.float16),
        (16, 2, 512, "values", 0.0, 200, bf16, bf16),
    ):
        whole, each = (heads * head_dim, kv_heads * head_dim), (head_dim, head_dim)
        sizes = {"": None, "whole": whole}.get(norm, each)
        pairs = 0 if norm == "not rotated" else head_dim // 2
        qk_norm_rope_append(
            torch.zeros(tokens, (heads + (1 if norm == "values" else 2) * kv_heads) * head_dim, dtype=dtype),
            heads=heads,
            kv_heads=kv_heads,
            v_norm=torch.zeros(head_dim) if norm == "values" else None,
            q_norm=torch.zeros(sizes[0], dtype=dtype) if sizes else None,
            k_norm=torch.zeros(sizes[1], dtype=dtype) if sizes else None,
            epsilon=1e-6,
            cosine=torch.zeros(4, pairs),
            sine=torch.zeros(4, pairs),
            norm_after_rotary=norm == "after",
            positions=torch.zeros(tokens, dtype=torch.int64),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            keys=torch.zeros(1, 1, kv_heads, head_dim).to(cache),
            values=torch.zeros(1, 1, kv_heads, head_dim).to(cache),
            clip=clip,
        )

    for dtype, tokens, shape in (
        (bf16, 1, LinearAttentionShape(16, 32, 128, 128, 4)),
        (bf16, 2, LinearAttentionShape(16, 32, 128, 128, 4)),
        (torch.float32, 300, LinearAttentionShape(2, 6, 96, 64, 3)),
    ):
        slot = torch.zeros(1, dtype=torch.int32)
        linear_attention(
            torch.zeros(tokens, shape.channels + shape.values + 2 * shape.value_heads, dtype=dtype),
            shape,
            convolution=torch.zeros(shape.taps, shape.channels),
            decay_rates=torch.zeros(shape.value_heads),
            decay_biases=torch.zeros(shape.value_heads),
            norm=torch.zeros(shape.value_dim),
            epsilon=1e-6,
            recent=torch.zeros(1, shape.taps - 1, shape.channels),
            states=torch.zeros(1, shape.value_heads, shape.key_dim, shape.value_dim),
            rows=StateRows(torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int(), slot, slot),
        )

    for tokens, outputs, columns in ((1, 5120, 2048), (4, 2880, 2880)):
        weight = torch.zeros(outputs, columns, dtype=bf16)
        few_rows_linear(weight[:tokens], weight, weight[:, 0].contiguous())
        few_rows_gated("silu", weight[:tokens], weight)
        for factors in (weight[0], weight[0].float()):
            few_rows_linear(weight[:tokens], weight, norm=RmsNorm(factors, 1e-6))
        few_rows_linear(weight[:tokens], weight, added_to=torch.zeros(tokens, outputs, dtype=bf16))

    for experts, chosen, dtype in ((128, 8, bf16), (60, 4, torch.float32)):
        extra: dict[str, Any] = {
            "on_gpu": torch.zeros(experts, dtype=torch.int64),
            "live_tokens": torch.zeros(1, dtype=torch.int32),
            "counts": torch.zeros(experts, dtype=torch.int32),
            "for_cpu": (torch.zeros(2, chosen, dtype=torch.int64), torch.zeros(2, chosen)),
        }
        for extras in (extra, dict.fromkeys(extra)):
            logits = torch.zeros(2, experts, dtype=dtype)
            route(logits, chosen, renormalise=experts == 128, **extras)
            by: dict[str, Any] = {"choice": logits.float(), "sigmoid": True, "scale": 2.5, "scales": logits[0].float()}
            route(logits, chosen, renormalise=experts == 128, **extras, **by)
            x = torch.zeros(2, 2880, dtype=dtype)
            quantised = x, expert_int8.Int8Rows.empty(2, 2880, x.device)
            route(logits, chosen, renormalise=experts == 128, **extras, **by, quantised=quantised)

    for tokens, hidden, experts, chosen, dtype, scoring in (
        (1, 2048, 128, 8, bf16, PLAIN),
        (4, 2880, 60, 4, torch.float16, Scoring(sigmoid=True, scale=2.5, scales=torch.zeros(60))),
    ):
        router = torch.zeros(experts, hidden, dtype=dtype)
        few_rows_route(
            router[:tokens],
            RmsNorm(router[0], 1e-6),
            router,
            None if scoring is PLAIN else router[:, 0].contiguous(),
            chosen,
            counters=torch.zeros(tokens, dtype=torch.int32),
            renormalise=True,
            scoring=scoring,
            live_tokens=torch.zeros(1, dtype=torch.int32),
            counts=torch.zeros(experts, dtype=torch.int32),
        )


ATTENTION_CASES = (
    (32, 4, 128, 16, torch.bfloat16, torch.bfloat16, ScoreOptions(0.1, 4096)),
    (16, 8, 256, 16, torch.bfloat16, torch.float8_e4m3fn, ScoreOptions(0.1)),
    (8, 8, 64, 64, torch.float32, torch.float32, ScoreOptions(0.1, 0, torch.zeros(8))),
    (40, 8, 128, 16, torch.bfloat16, torch.bfloat16, ScoreOptions(0.1, chunk=8192)),
    (16, 2, 512, 16, torch.bfloat16, torch.bfloat16, ScoreOptions(1.0)),
)
"""heads, key/value heads, head_dim, page size, types of queries and cache, options of the scores"""


def attention() -> None:
    """Decode rows, all of a step or some of them, and tiles of chunks."""
    indices = torch.zeros(16, dtype=torch.int32)
    chunks, decode = Tables(indices, indices, indices, indices), Tables(indices, indices, indices)
    for heads, kv_heads, head_dim, page_size, dtype, cache, options in ATTENTION_CASES:
        query = torch.zeros(5, heads, head_dim, dtype=dtype)
        keys = torch.zeros(4, page_size, kv_heads, head_dim).to(cache)
        tables, rows = (chunks, indices) if head_dim == 128 else (decode, None)
        for items, splits in ((3, 128), (5, 8)):
            workspace = torch.zeros(triton_decode.partial_bytes(items, heads, head_dim, splits), dtype=torch.uint8)
            of_items = DecodeRows(items, rows, splits, workspace)
            triton_decode.decode(query, keys, keys, tables, of_items, query, options)
        for long_blocks in (False, True):
            with patch.object(triton_prefill, "has_large_shared_memory", lambda _, has=long_blocks: has):
                triton_prefill.prefill(query, keys, keys, chunks, indices.view(-1, 2), query, options)
    latent_attention()
    latent_inputs()


def latent_attention() -> None:
    """DeepSeek's latents, with one split of the keys and with many, and expanded; scores of the indexer."""
    indices = torch.zeros(16, dtype=torch.int32)
    same, pairs = (indices,) * 3, indices.view(-1, 2)
    decode, rows, tiles = Tables(*same), ExpandedRows(pairs, *same), KeyTiles(pairs, *same, 64)
    for heads, dtype, cache, splits, row_of in (
        (16, torch.bfloat16, torch.bfloat16, 1, indices),
        (128, torch.bfloat16, torch.float8_e4m3fn, 8, None),
        (16, torch.float32, torch.float32, 1, None),
    ):
        query, out = torch.zeros(3, heads, 576, dtype=dtype), torch.zeros(3, heads, 512, dtype=dtype)
        keys, up = torch.zeros(4, 16, 1, 576).to(cache), torch.zeros(heads, 256, 512, dtype=dtype)
        workspace = torch.zeros(triton_decode.partial_bytes(3, heads, 512, splits), dtype=torch.uint8)
        latent.attend(query, keys, out, decode, DecodeRows(3, row_of, splits, workspace), scaling=0.1)
        if splits > 1:
            for tile in TILES:
                latent.attend(query, keys, out, decode, DecodeRows(3, row_of, 1, workspace), scaling=0.1, tile=tile)
            rows_of, value_up = DecodeRows(3, row_of, splits, workspace), up[:, 128:].transpose(1, 2)
            latent.attend(query, keys, out[..., :128], decode, rows_of, scaling=0.1, value_up=value_up)
        states, latents = query.new_zeros(64, heads, 256), query.new_zeros(64, 576 if splits > 1 else 64)
        expand_keys(keys, up, tiles, rows, states, query.new_zeros(64, 64), scale=1.0, processors=132)
        attend_expanded(query[..., :192], states, latents, out[..., :128], rows, scaling=0.1)
    query, keys = (torch.zeros(*sizes, 128, dtype=torch.bfloat16) for sizes in ((3, 64), (4, 16)))
    index_scores(query, torch.zeros(3, 64), keys, indices[:6].view(3, 2), indices)


def latent_inputs() -> None:
    """Queries and keys of DeepSeek's layers, absorbed and not."""
    for heads, tokens, dtype, cache, absorbs in (
        (16, 1, torch.bfloat16, torch.bfloat16, True),
        (128, 64, torch.bfloat16, torch.float8_e4m3fn, True),
        (16, 20, torch.float32, torch.float32, True),
        (16, 2048, torch.bfloat16, torch.bfloat16, False),
    ):
        shape = LatentShape(heads, 128, 64, 128, 512, 0.1, interleaved=heads == 16, low_rank=0, epsilon=1e-6)
        down = torch.zeros(tokens, heads * 192 + 576, dtype=dtype)
        latent_query_append(
            down[:, :-576],
            down[:, -576:],
            shape,
            norm=down[0, :512],
            key_up=torch.zeros(heads, 256, 512, dtype=dtype)[:, :128] if absorbs else None,
            cosine=torch.zeros(4, 32),
            sine=torch.zeros(4, 32),
            positions=torch.zeros(tokens, dtype=torch.int64),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            cache=torch.zeros(1, 16, 1, 576).to(cache),
        )


EXPERTS, SLOTS, RECORD = 128, 8, ExpertRecord("Q4_K", "Q4_K", "Q6_K", 2048, 768)


def experts(tokens: int) -> None:
    """Experts with few tokens: all three launches. With several, their weights multiply the input."""
    pool, offsets = torch.zeros(64, dtype=torch.uint8), torch.zeros(EXPERTS, dtype=torch.int64)
    ids, weights = torch.zeros(tokens, SLOTS, dtype=torch.int64), torch.zeros(tokens, SLOTS)
    pairs = ExpertPairs(pool, offsets, ids, RECORD)
    x, lists = expert_int8.prepare(pairs, torch.zeros(tokens, RECORD.hidden, dtype=torch.bfloat16))
    of_input, of_output = (None, weights) if tokens == 1 else (weights, None)
    mid = expert_int8.gate_up(pairs, lists, x, SILU, of_input)
    expert_int8.down(pairs, lists, mid, of_output)
    if lists is None:
        residual = torch.zeros(tokens, RECORD.hidden, dtype=torch.bfloat16)
        expert_int8.down(pairs, lists, mid, of_output, added_to=residual, counters=torch.zeros(64, dtype=torch.int32))


def few_pairs() -> None:
    """Experts of one token in every format, launched early, with the sum of its pairs."""
    pool, offsets = torch.zeros(64, dtype=torch.uint8), torch.zeros(EXPERTS, dtype=torch.int64)
    residual, counters = torch.zeros(1, 2048, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32)
    formats = [quant for quant in QUANTS if quant not in FLOAT_PRODUCTS]
    for gate, up, down in zip(formats[::3], formats[1::3] + formats, formats[2::3] + formats, strict=False):
        pairs = ExpertPairs(pool, offsets, offsets[None, :SLOTS], ExpertRecord(gate, up, down, 2048, 768))
        with dependent_launches(True):
            mid = expert_few_pairs.gate_up(pairs, expert_int8.Int8Rows.empty(1, 2048, pool.device), SILU, None)
            expert_few_pairs.down(pairs, mid, torch.zeros(1, SLOTS), added_to=residual, counters=counters)


def decoded(record: ExpertRecord, gate: GateFacts, *, biased: bool) -> None:
    """Experts that are decoded: all launches around both products."""
    pool, offsets = torch.zeros(64, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    biases = ExpertBiases(*(torch.zeros(2, rows) for rows in (record.intermediate, record.intermediate, record.hidden)))
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    pairs = ExpertPairs(pool, offsets, ids, record, biases if biased else None)
    memory = torch.zeros(decoded_experts.decoded_weights(record, 2), dtype=torch.bfloat16)
    decoded_experts.experts(pairs, offsets, memory.new_zeros(3, record.hidden), weights, gate, memory)


def around_warpgroups(tokens: int) -> None:
    """The launches beside those of expert_warpgroups.cu."""
    ids, rows = torch.zeros(tokens, SLOTS, dtype=torch.int64), torch.zeros(tokens, 2048, dtype=torch.bfloat16)
    pairs = ExpertPairs(ids, ids[:16].flatten(), ids, RECORD)
    sort_pairs(pairs)
    in_order(rows)


def expert_tiles() -> None:
    """Choices of the benchmark that differ in more than the size of their tiles."""
    memory, offsets = torch.zeros(64, dtype=torch.uint8), torch.zeros(1, EXPERTS, dtype=torch.int64)
    layers = benchmark.Layers(memory, offsets, RECORD, torch.zeros(1, dtype=torch.bfloat16))
    for name in ("dots 8 of some, 8x32x3, 8x32", "cores 16x64, permuted", "cores 64x128, permuted, 3 stages"):
        choice = benchmark.CHOICES[name]
        benchmark.Step.make(layers, 0, max(choice.least, 16), SLOTS).run(choice, layers.memory)


def fetched(tokens: int, slots: int) -> None:
    """Experts that a step fetches: both launches."""
    ids, sources = torch.zeros(tokens, SLOTS, dtype=torch.int64), torch.zeros(slots, 2, dtype=torch.int64)
    offsets, addresses = torch.zeros(EXPERTS, dtype=torch.int64), torch.zeros(EXPERTS, 2, dtype=torch.int64)
    allowed = torch.ones(1)
    fetch.divide(ids, offsets, addresses, 0.3, allowed, 0, RECORD.bytes, offsets=offsets, sources=sources, cpu_ids=ids)
    memory = torch.zeros(64, dtype=torch.uint8)
    fetch.fetch(sources, torch.zeros(2, 2, dtype=torch.int64), [(0, 1 << 20)], memory, 0, RECORD.bytes)


def matrix(quant: str, rows: int, columns: int) -> PanelMatrix:
    """A matrix of a model's size. Its weights are never read."""
    return PanelMatrix(torch.zeros(64, dtype=torch.uint8), quant, rows, columns)


def panel_matrices() -> None:
    """Products of few rows, and decoded rows."""
    for tokens, columns, parts in (
        (1, 2048, [matrix("Q4_K", 4608, 2048), matrix("Q6_K", 512, 2048)]),
        (4, 4096, [matrix("Q4_K", 2048, 4096)]),
        (2, 2880, [matrix("IQ4_NL", 100, 2880)]),
        (2, 2048, [matrix("UINT4", 512, 2048), matrix("Q5_1", 512, 2048)]),
        (2, 2048, [matrix("FP4", 512, 2048)]),
    ):
        x = torch.zeros(tokens, columns, dtype=torch.float16 if columns == 2880 else torch.bfloat16)
        out = torch.zeros(tokens, sum(part.rows for part in parts), dtype=x.dtype)
        for options in ({}, {"adds": True}, {"norm": RmsNorm(x[0], 1e-6)}):
            multiply_few(parts, x, out[0] if columns == 2880 else None, out, **options)
    for quant, ids in (("Q4_K", None), ("FP8", None), ("FP4", None), ("Q6_K", torch.zeros(3, dtype=torch.int64))):
        matrix(quant, 512, 2048).decode(torch.zeros(3, 2048, dtype=torch.bfloat16), ids=ids)


def sampling() -> None:
    """The most likely token, and draws from the candidates, of a large and of a small vocabulary."""
    for vocab, candidates in ((151_936, 1024), (300, 300)):
        values = torch.zeros(1, candidates)
        numbers = (torch.zeros(1, dtype=dtype) for dtype in (torch.int64, torch.float64, torch.float32, torch.float64))
        draw_from_candidates(values, values.long(), torch.zeros(1, vocab), Filters(*numbers))
    greedy(torch.zeros(1, 151_936))


def compile_topic(topic: str) -> None:
    """Launch every kernel of the topic."""
    alone = {"between matrices": between_matrices, "few pairs": few_pairs, "expert tiles": expert_tiles}
    alone |= {"matrices": panel_matrices, "sampling": sampling, "attention": attention}
    if topic in alone:
        alone[topic]()
    elif topic == "experts":
        for tokens in (1, 4, 64):
            experts(tokens)
        for tokens, slots in ((1, 2), (64, 38)):
            fetched(tokens, slots)
    elif topic == "decoded experts":
        decoded(RECORD, SILU, biased=False)
        decoded(ExpertRecord("MXFP4", "MXFP4", "BF16", 2880, 2880), GateFacts("swiglu_clamped", 1.7, 7.0), biased=True)
    elif topic == "warpgroups":
        around_warpgroups(512)
        around_warpgroups(2048)
    elif topic == "dependent launches":
        with dependent_launches(True):
            between_matrices()
            experts(1)
            fetched(1, 2)
            panel_matrices()
            attention()
    else:
        raise ValueError(f"unknown topic {topic}")


if __name__ == "__main__":
    with compiling() as names:
        compile_topic(sys.argv[1])
    sys.stdout.write(" ".join(names))
