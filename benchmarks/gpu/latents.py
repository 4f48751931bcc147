"""Measures decode steps of latent attention on a GPU: `python -m benchmarks.gpu.latents [--results DIR]`, 2 minutes.

Microseconds of one layer in a CUDA graph of LAYERS layers with their own weights and keys. First what stands between
the products of a step: the key and the absorbed query, by torch's operations and by one launch (attention/
latent_inputs.py). Then attention with the expansion to values: as it is, joined (attention/latent.py), with other
tiles, and by FlashInfer's MLA kernels where they are installed. GB/s count the bytes of the keys. Each way is compared
with the first: `difference` is relative to the norm of its result.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.command import command_line
from benchmarks.gpu.attention import make_step, seconds
from benchmarks.results import GrowingResult
from ktqueue.bench.environment import environment
from ktqueue.operators.gpu.attention import latent
from ktqueue.operators.gpu.attention.backends import make_planner
from ktqueue.operators.gpu.attention.latent_inputs import latent_query_append
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.latent_shape import LatentShape, absorb_query, expand_values, make_key
from ktqueue.operators.step import ScoreOptions, StepContext

LATENT, ROTARY, PLAIN, PAGE_SIZE, LAYERS = 512, 64, 128, 16, 8
SCALING = (PLAIN + ROTARY) ** -0.5
ROWS = (1, 4, 16, 64)
KEYS = (256, 2048, 16384)
HEADS = (16, 128)
"""Those of DeepSeek-V2-Lite and of V3."""
TYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
TILES = (latent.LatentTile(32, 4, 3), latent.LatentTile(64, 4, 2), latent.LatentTile(64, 8, 2))
Layer = Callable[[int], torch.Tensor]


def in_graph(layer: Layer) -> tuple[float, torch.Tensor]:
    """Microseconds of one of LAYERS calls that are captured together, and the last result."""
    for index in range(LAYERS):
        layer(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(LAYERS):
            result = layer(index)
    return 1e6 * seconds(graph.replay, 20) / LAYERS, result.float()


def compared(ways: dict[str, Layer], **facts: Any) -> Iterator[dict[str, Any]]:
    """Time each way. The first one has the result that the others should have."""
    expected: torch.Tensor | None = None
    for name, layer in ways.items():
        try:
            taken, result = in_graph(layer)
        except Exception as error:  # a tile that the device does not hold, a library's own errors
            yield {**facts, "way": name, "error": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        expected = result if expected is None else expected
        difference = float((result.view_as(expected) - expected).norm() / expected.norm())
        yield {**facts, "way": name, "layer_us": taken, "difference": difference}


def inputs(heads: int, rows: int, kv: KVCache) -> Iterator[dict[str, Any]]:
    """The key and the absorbed query of each row."""
    shape = LatentShape(heads, PLAIN, ROTARY, PLAIN, LATENT, SCALING, interleaved=True, low_rank=0, epsilon=1e-6)
    ups = [(random(heads, 2 * PLAIN, LATENT) / PLAIN**0.5)[:, :PLAIN] for _ in range(LAYERS)]
    down, norm = random(rows, heads * (PLAIN + ROTARY) + shape.key), random(LATENT)
    query, key = down[:, : -shape.key], down[:, -shape.key :]
    angles = torch.rand(4096, ROTARY // 2, device="cuda") * 6
    cosine, sine = angles.cos(), angles.sin()
    positions = torch.arange(rows, device="cuda") * 61
    slots = torch.arange(rows, device="cuda")

    def by_torch(layer: int) -> torch.Tensor:
        c, s = cosine[positions], sine[positions]
        kv.write(layer, slots, make_key(key, norm, c, s, shape)[:, None])
        return absorb_query(query, ups[layer], c, s, shape)

    def fused(layer: int) -> torch.Tensor:
        return latent_query_append(
            query, key, shape, norm=norm, key_up=ups[layer], cosine=cosine, sine=sine,
            positions=positions, slot_mapping=slots, cache=kv.keys[layer],
        )  # fmt: skip

    yield from compared({"torch": by_torch, "fused": fused}, part="inputs", heads=heads, rows=rows)


def values(heads: int, rows: int, keys: int, kv: KVCache) -> Iterator[dict[str, Any]]:
    """Attention of decode rows, expanded to values."""
    step = make_step(kv, rows, 1, keys)
    planner = make_planner(
        kv.layout, heads=heads, scaling=SCALING, windows={0}, device="cuda", backend="triton", dtype=torch.bfloat16
    )
    plan = planner.decode_plan(rows, -(-keys // PAGE_SIZE))
    assert isinstance(plan, latent.LatentPlan) and plan.decode_rows is not None
    plan.update(step)
    query = random(rows, heads, LATENT + ROTARY)
    ups = [(random(heads, 2 * PLAIN, LATENT) / LATENT**0.5)[:, PLAIN:].transpose(1, 2) for _ in range(LAYERS)]
    options, decode_rows, tables = ScoreOptions(SCALING), plan.decode_rows, plan.tables

    def attended(layer: int) -> torch.Tensor:
        return expand_values(plan.attend(layer, query, kv, options), ups[layer])

    def joined(layer: int) -> torch.Tensor:
        return plan.values(layer, query, ups[layer], kv, options)

    def tiled(tile: latent.LatentTile) -> Layer:
        def layer_of(layer: int) -> torch.Tensor:
            out = query.new_empty(rows, heads, LATENT)
            latent.attend(query, kv.keys[layer], out, tables, decode_rows, scaling=SCALING, tile=tile)
            return expand_values(out, ups[layer])

        return layer_of

    ways: dict[str, Layer] = {"attend, expand": attended, "joined": joined}
    ways |= {f"{tile.keys} keys, {tile.warps} warps, {tile.stages} stages": tiled(tile) for tile in TILES}
    by_flashinfer = flashinfer_mla(heads, step, kv)
    if isinstance(by_flashinfer, str):
        sys.stderr.write(f"FlashInfer: {by_flashinfer}\n")
    else:
        ways["FlashInfer, expand"] = lambda layer: expand_values(by_flashinfer(layer, query), ups[layer])
    size = rows * keys * (LATENT + ROTARY) * kv.layout.dtype.itemsize
    for figure in compared(ways, part="values", heads=heads, rows=rows, keys=keys):
        yield {**figure, "gb_s": size / figure["layer_us"] / 1e3} if "layer_us" in figure else figure


def flashinfer_mla(heads: int, step: StepContext, kv: KVCache) -> Callable[[int, torch.Tensor], torch.Tensor] | str:
    """FlashInfer's kernels with a plan of the step; or why there are none."""
    if kv.layout.dtype != torch.bfloat16:
        return "its MLA kernels of this kind read 16 bits only"
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        rows, pages = len(step.context_lengths), step.page_table.shape[1]
        starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        lists, lengths = step.page_table.reshape(-1).cuda(), step.context_lengths.cuda()
        wrapper = BatchMLAPagedAttentionWrapper(
            torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), use_cuda_graph=True,
            qo_indptr=starts, kv_indptr=starts * pages, kv_indices=lists, kv_len_arr=lengths,
        )  # fmt: skip
        wrapper.plan(
            starts, starts * pages, lists, lengths, heads, LATENT, ROTARY, PAGE_SIZE, False, SCALING,
            torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
    except Exception as error:  # the library, its compiler and its bindings have their own exceptions
        return f"{type(error).__name__}: {error}"

    def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
        cache = kv.keys[layer][:, :, 0]
        result: torch.Tensor = wrapper.run(
            query[..., :LATENT], query[..., LATENT:], cache[..., :LATENT], cache[..., LATENT:]
        )
        return result

    return attend


def random(*shape: int) -> torch.Tensor:
    """Noise in bfloat16."""
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def main() -> None:
    """Measure every shape, and keep the figures."""
    arguments = command_line(__doc__).parse_args()
    result = GrowingResult(arguments.results / "latents.json", environment=environment(), layers=LAYERS)
    pages = max(ROWS) * max(KEYS) // PAGE_SIZE
    for name, dtype in TYPES.items():
        layout = KVLayout(
            layers=LAYERS, kv_heads=1, head_dim=LATENT + ROTARY, page_size=PAGE_SIZE, dtype=dtype, latent=LATENT
        )
        kv = KVCache(layout, pages, "cuda")
        for keys_of in kv.keys:
            for part in torch.split(keys_of, 1024):
                part.copy_(torch.randn(part.shape, device="cuda").to(dtype))
        for heads in HEADS:
            for rows in ROWS:
                figures = [*inputs(heads, rows, kv)]
                for keys in KEYS:
                    figures += values(heads, rows, keys, kv)
                for figure in figures:
                    result.add({"cache": name, **figure})
        del kv


if __name__ == "__main__":
    main()
