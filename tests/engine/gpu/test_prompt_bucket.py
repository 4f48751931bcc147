"""Captured steps with prompts, run on the CPU: sizes, padding, what runs eagerly, and that no output changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_workload import outputs_of_steps, workload

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.engine_parts import captured_prompts
from ktqueue.engine.gpu import prompt_bucket
from ktqueue.engine.gpu.graph_capture import RepeatedCall
from ktqueue.engine.gpu.graph_runner import GraphRunner
from ktqueue.engine.gpu.prompt_bucket import ROWS, PromptBucket, prompt_buckets_up_to
from ktqueue.operators.gpu.attention.torch import TorchPlanner
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.linear_attention import LinearAttentionShape

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9]


@pytest.fixture
def parts() -> Any:
    return "device"


@pytest.fixture
def capturing(make_model: Any) -> Any:
    """A model whose steps of at most 64 tokens are captured."""
    made = make_model()
    made.most_captured_tokens = 64
    return made


LARGE = [3072, 4096, 6144, 8192]


def test_captured_token_counts_rise_up_to_the_limit() -> None:
    assert prompt_buckets_up_to(0) == prompt_buckets_up_to(ROWS) == []
    assert prompt_buckets_up_to(20) == [20]
    assert prompt_buckets_up_to(256) == [32, 64, 128, 256]
    assert prompt_buckets_up_to(300) == [32, 64, 128, 256, 300]
    assert prompt_buckets_up_to(2048) == [32, 64, 128, 256, 512, 1024, 1536, 2048]
    assert prompt_buckets_up_to(9000) == prompt_buckets_up_to(8192) == [*prompt_buckets_up_to(2048), *LARGE]


@pytest.mark.parametrize("pages", [400, 18])
@pytest.mark.parametrize("seed", range(4))
def test_captured_prompts_change_no_output(
    make_crowded: Any, capturing: Any, compile_grammar: Any, seed: int, pages: int
) -> None:
    """Chunks beside decode rows, prefixes, aborts, preemptions and logits that are not finite."""
    usual, engine = (make_crowded(seed, pages, model=model, max_num_batched_tokens=24) for model in (None, capturing))
    expected = outputs_of_steps(usual, workload(seed), compile_grammar)
    assert outputs_of_steps(engine, workload(seed), compile_grammar) == expected
    stats = engine.stats()
    assert stats.steps == usual.stats().steps
    if seed % 3 < 2:
        assert stats.replayed_steps == stats.steps > usual.stats().replayed_steps
    else:
        assert stats.replayed_steps == 0


@pytest.mark.parametrize(
    ("prompts", "logprobs", "most_keys", "replayed"),
    [
        (1, None, 8192, 4),
        (ROWS, None, 8192, 4),
        (ROWS + 1, None, 8192, 3),  # rows
        (1, 0, 8192, 4),
        (2, 0, 8192, 3),  # scored tokens
        (1, None, 8, 3),  # keys
    ],
)
def test_steps_that_do_not_fit_run_eagerly(
    capturing: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any,
    monkeypatch: pytest.MonkeyPatch, prompts: int, logprobs: int | None, most_keys: int, replayed: int,
) -> None:  # fmt: skip
    """Of four steps the first reads the prompts."""
    capturing.most_captured_tokens = 256
    monkeypatch.setattr(prompt_bucket, "MOST_KEYS", most_keys)
    engine = make_engine(capturing, vocabulary, max_num_seqs=20, max_num_batched_tokens=256, num_pages=100)
    for i in range(prompts):
        engine.add(f"r{i}", [i, *PROMPT[1:]], SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=logprobs))
    results = run(engine)
    assert all(results[f"r{i}", 0].token_ids == greedy([i, *PROMPT[1:]], 4) for i in range(prompts))
    assert (engine.stats().steps, engine.stats().replayed_steps) == (4, replayed)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_captured_step_that_does_not_fit_in_memory_is_halved(
    capturing: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, rows: int
) -> None:
    class Limited:
        """It has memory for a limited number of rows."""

        most_captured_tokens, refused = 128, 0

        def __call__(self, **arguments: Any) -> Any:
            if (arguments["step"].query_starts.diff() > 0)[: int(arguments["step"].live_tokens)].sum() > rows:
                self.refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return capturing(**arguments)

    limited = Limited()
    engine = make_engine(limited, vocabulary, max_num_seqs=8, max_num_batched_tokens=128)
    for i in range(8):
        engine.add(f"r{i}", PROMPT[: 1 + i], SamplingParams(temperature=0.0, max_tokens=6))
    results = run(engine)
    assert all(results[f"r{i}", 0].token_ids == greedy(PROMPT[: 1 + i], 6) for i in range(8))
    assert engine.stats().out_of_memory == limited.refused > 0
    assert max(step[0] for step in capturing.steps) <= rows


def test_a_longer_prompt_runs_eagerly_and_its_last_chunk_does_not(
    capturing: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    capturing.most_captured_tokens = 32
    engine = make_engine(capturing, vocabulary, max_num_batched_tokens=50)
    prompt = [(7 * i) % 90 for i in range(70)]
    engine.add("r", prompt, SamplingParams(temperature=0.0, max_tokens=3))
    assert run(engine)["r", 0].token_ids == greedy(prompt, 3)
    assert (engine.stats().steps, engine.stats().replayed_steps) == (4, 3)


def test_the_largest_steps_are_captured_first(capturing: Any) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=4, dtype=torch.float32)
    seen: list[tuple[int, int, str]] = []
    runner = GraphRunner(
        capturing,
        97,
        KVCache(layout, 8, scratch=True),
        TorchPlanner(4),
        RepeatedCall(),
        device="cpu",
        buckets=[1],
        prompts=[17, 32],
        max_pages=8,
        progress=lambda *step: seen.append(step),
    )
    assert seen == [(1, 3, "prompt graphs"), (2, 3, "prompt graphs"), (3, 3, "decode graphs")]
    assert [bucket.tokens for bucket in runner.prompt_buckets] == [17, 32]


def test_models_without_captured_prompts(capturing: Any, model: Any) -> None:
    """Others than GpuDecoder, indexers that choose keys, states of linear attention, and engines without graphs."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=4, dtype=torch.float32)
    shape = LinearAttentionShape(key_heads=1, value_heads=1, key_dim=4, value_dim=4, taps=2)
    config = EngineConfig(max_num_batched_tokens=100)
    assert captured_prompts(config, capturing, layout) == [32, 64]
    assert captured_prompts(config, model, layout) == []
    assert captured_prompts(replace(config, cuda_graphs=False), capturing, layout) == []
    assert captured_prompts(config, capturing, replace(layout, latent=6)) == [32, 64]
    assert captured_prompts(config, capturing, replace(layout, latent=6, index=4)) == []
    assert captured_prompts(config, capturing, replace(layout, linear=(shape,))) == []
    kv = KVCache(replace(layout, linear=(shape,)), 8, slots=4, scratch=True)
    others = KVCache(layout, 8, scratch=True), KVCache(layout, 8)
    for cache, tokens, problem in (
        (kv, 17, "without states"),
        (others[0], 16, "16 tokens"),
        (others[1], 17, "scratch"),
    ):
        with pytest.raises(ValueError, match=problem):
            PromptBucket(tokens, 8, cache, TorchPlanner(4), "cpu")
