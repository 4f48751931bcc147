"""On Hopper, prompts by warpgroups attend as the reference does, eager and captured, and models say about the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from device_engine import on_device
from transformers import Qwen3Config, Qwen3ForCausalLM

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.loading.load import load_model
from ktqueue.operators import reference
from ktqueue.operators.gpu.attention import by_warpgroups
from ktqueue.operators.gpu.attention.base import AttentionShape
from ktqueue.operators.gpu.attention.triton import TritonPlanner
from ktqueue.operators.gpu.device import has_warpgroups
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import ScoreOptions, StepContext

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

LARGEST_ERROR = 0.006
"""Of all results, relative. The types of 16 bits alone make 0.002."""
SIZES = {
    "qwen3": (32, 4, 128, 16),
    "gpt-oss": (64, 8, 64, 16),
    "seven heads": (28, 4, 128, 32),
    "mha": (16, 16, 64, 64),
}
SIZES |= {"large pages": (8, 2, 128, 256), "full pages": (8, 2, 128, 128), "small pages": (8, 2, 128, 8)}
"""heads, key/value heads, columns, page size"""
SEVERAL = ([300, 17, 1024, 1, 2], [300, 900, 1024, 77, 130])
"""Tokens of each row, and the keys that its last token sees."""
CASES: list[tuple[str, torch.dtype, list[int], list[int], dict[str, Any]]] = [
    ("qwen3", torch.bfloat16, [100], [100], {}),
    ("qwen3", torch.bfloat16, [256], [256], {}),
    ("qwen3", torch.bfloat16, [1000], [1000], {}),
    ("qwen3", torch.bfloat16, [300], [2000], {}),
    ("qwen3", torch.bfloat16, *SEVERAL, {}),
    ("qwen3", torch.float16, *SEVERAL, {}),
    ("qwen3", torch.bfloat16, *SEVERAL, {"cap": 30.0}),
    ("qwen3", torch.bfloat16, *SEVERAL, {"chunk": 512}),
    ("qwen3", torch.bfloat16, [700, 5], [1700, 500], {"chunk": 96}),
    ("qwen3", torch.bfloat16, [700, 5], [1700, 500], {"sliding_window": 128}),
    ("qwen3", torch.bfloat16, [700, 5], [1700, 500], {"sliding_window": 1}),
    ("gpt-oss", torch.bfloat16, [700, 5], [1700, 500], {"sinks": True}),
    ("gpt-oss", torch.bfloat16, [700, 5], [1700, 500], {"sinks": True, "sliding_window": 128}),
    ("seven heads", torch.bfloat16, *SEVERAL, {}),
    ("mha", torch.float16, *SEVERAL, {}),
    ("large pages", torch.bfloat16, *SEVERAL, {}),
    ("full pages", torch.bfloat16, *SEVERAL, {}),
    ("small pages", torch.bfloat16, *SEVERAL, {}),
]


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if not torch.cuda.is_available() or not has_warpgroups("cuda"):
        pytest.skip("there is no GPU with warpgroups")
    torch.manual_seed(0)


def make(sizes: tuple[int, int, int, int], dtype: torch.dtype, pages: int) -> tuple[TritonPlanner, KVCache]:
    """A planner whose prompts are those of warpgroups, and a cache in which no number is written."""
    heads, kv_heads, head_dim, page_size = sizes
    layout = KVLayout(layers=1, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype)
    planner = TritonPlanner(
        AttentionShape(
            layout=layout, heads=heads, scaling=head_dim**-0.5, windows=(0,), device="cuda", dtype=dtype,
        )
    )  # fmt: skip
    assert planner.counter is not None
    kv = KVCache(layout, pages, "cuda")
    for tensor in (kv.keys[0], kv.values[0]):
        tensor.fill_(float("nan"))
    return planner, kv


def make_step(kv: KVCache, chunks: list[int], contexts: list[int]) -> StepContext:
    """A step on the host, with random pages of `kv`. Only the rows' keys and values are numbers."""
    size = kv.layout.page_size
    drawn = torch.randperm(kv.pages)
    table = torch.zeros(len(chunks), -(-max(contexts) // size) + 1, dtype=torch.int32)
    for row, context in enumerate(contexts):
        count = -(-context // size)
        table[row, :count], drawn = drawn[:count], drawn[count:]
        slots = (table[row, :count, None].long() * size + torch.arange(size)).flatten()[:context].cuda()
        for tensor in (kv.keys[0], kv.values[0]):
            cells = tensor.flatten(0, 1)
            cells[slots] = torch.randn(context, *cells.shape[1:], device="cuda").to(cells.dtype)
    starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.zeros(sum(chunks), dtype=torch.int64)
    return StepContext(starts, torch.tensor(contexts, dtype=torch.int32), table, slots, kv)


def check(got: torch.Tensor, step: StepContext, query: torch.Tensor, options: ScoreOptions) -> None:
    """`got` is what the reference attends, in float32."""
    twin = reference.paged_attention(
        query.cpu().float().transpose(0, 1),
        step.kv.keys[0].cpu().float(),
        step.kv.values[0].cpu().float(),
        step.query_starts,
        step.context_lengths,
        step.page_table,
        scaling=options.scaling,
        sliding_window=options.sliding_window or None,
        sinks=None if options.sinks is None else options.sinks.cpu(),
        cap=options.cap,
        chunk=options.chunk,
    )
    assert got.dtype == query.dtype and got.shape == query.shape
    assert (got.cpu().float() - twin).norm() / twin.norm() < LARGEST_ERROR
    torch.testing.assert_close(got.cpu().float(), twin, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]} of {case[3]} {case[4]}")
def test_prompts_attend_as_the_reference_does(case: Any) -> None:
    """What others left in the cache is never read, no number even. All bits repeat."""
    name, dtype, chunks, contexts, further = case
    sizes = SIZES[name]
    planner, kv = make(sizes, dtype, sum(-(-context // sizes[3]) for context in contexts) + 3)
    step = make_step(kv, chunks, contexts)
    query = torch.randn(sum(chunks), sizes[0], sizes[2], device="cuda").to(dtype)
    sinks = torch.linspace(-20, 20, sizes[0], device="cuda") if further.get("sinks") else None
    options = ScoreOptions(sizes[2] ** -0.5)._replace(**{**further, "sinks": sinks})
    plan = planner.prompt_plan(len(chunks), sum(chunks), 200)  # rows of one token have tiles, too
    plan.update(step)
    for one in (plan, planner.plan(step)):
        first, second = (one.attend(0, query, kv, options) for _ in range(2))
        check(first, step, query, options)
        assert first.equal(second)
    assert planner.counter is not None and not planner.counter.any()


def test_a_long_prompt_takes_all_processors() -> None:
    planner, kv = make(SIZES["qwen3"], torch.bfloat16, 200)
    step = make_step(kv, [3000], [3000])
    query = torch.randn(3000, 32, 128, device="cuda").to(torch.bfloat16)
    check(planner.plan(step).attend(0, query, kv, ScoreOptions(128**-0.5)), step, query, ScoreOptions(128**-0.5))


def test_a_graph_follows_updates() -> None:
    planner, kv = make(SIZES["qwen3"], torch.bfloat16, 1100)
    query = torch.randn(512, 32, 128, device="cuda").to(torch.bfloat16)
    plan, options = planner.prompt_plan(16, 512, 1024), ScoreOptions(128**-0.5)
    plan.attend(0, query, kv, options)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = plan.attend(0, query, kv, options)
    for chunks, contexts in (([512], [512]), ([1] * 16, [*range(1, 17)]), ([64, 300], [16384, 301]), ([1], [1])):
        step, live = make_step(kv, chunks, contexts), sum(chunks)
        plan.update(step)
        graph.replay()
        check(found[:live], step, query[:live], options)
        assert not found[live:].any()


@pytest.mark.parametrize("graphs", [True, False])
def test_a_model_says_about_the_same(
    graphs: bool, by_decoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log probabilities of prompts, of one step and of several, captured and eager, beside those by Triton."""
    torch.manual_seed(0)
    config: Any = Qwen3Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=512, intermediate_size=128, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    kind: Any = Qwen3ForCausalLM
    kind(config).float().save_pretrained(tmp_path)
    prompts = [[(7 * i + 13 * row) % 500 for i in range(length)] for row, length in enumerate((3, 40, 200, 130, 64))]
    found, fits = [], by_warpgroups.fits
    for tried in (False, True, True):
        model = load_model(str(tmp_path), rules=by_decoder, device="cuda", dtype=torch.bfloat16)
        monkeypatch.setattr(by_warpgroups, "fits", fits if tried else lambda _: False)
        settings = EngineConfig(
            device="cuda", max_num_seqs=12, max_num_batched_tokens=96, dtype="bfloat16", num_pages=200,
            cuda_graphs=graphs,
        )  # fmt: skip
        engine = on_device(model, settings)
        for row, prompt in enumerate(prompts):
            engine.add(str(row), prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
        values: dict[str, list[float]] = {str(row): [] for row in range(len(prompts))}
        while engine.has_work:
            for one in engine.step():
                assert one.error is None, one.error
                values[one.request_id] += [entry.chosen.logprob for entry in one.prompt_logprobs if entry is not None]
        engine.close()
        found.append(torch.cat([torch.tensor(row) for row in values.values()]))
    assert len(found[0]) == sum(len(prompt) - 1 for prompt in prompts)
    assert found[1].equal(found[2])
    torch.testing.assert_close(found[1], found[0], atol=0.05, rtol=0)
