"""Captured steps, run on the CPU: fixed tensors, padding, and steps that run eagerly. The scheduler is not tested."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.batch import Batch
from ktqueue.engine.engine import Engine
from ktqueue.engine.engine_parts import EngineParts
from ktqueue.engine.gpu.capture_choice import CaptureChoice
from ktqueue.engine.gpu.decode_bucket import DecodeBucket
from ktqueue.engine.gpu.graph_capture import Function, GraphCapturer, RepeatedCall
from ktqueue.engine.gpu.graph_runner import GraphRunner, buckets_up_to
from ktqueue.engine.token_selector import Selector, TokenSelection, do_nothing
from ktqueue.loading.load import load_model
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators.gpu.attention.torch import TorchPlanner
from ktqueue.operators.gpu.kernels.activation import gated
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9]


@pytest.fixture
def parts() -> Any:
    return "device"


def test_captured_row_counts_rise_up_to_the_limit() -> None:
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(20) == [1, 2, 4, 8, 16, 20]
    assert buckets_up_to(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert buckets_up_to(200) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200]
    assert buckets_up_to(300) == buckets_up_to(256) == [*buckets_up_to(192), 256]


def test_a_captured_step_has_the_pages_of_its_rows_and_no_others() -> None:
    """After longer rows, too: what they had beyond is 0 again."""
    kv = KVCache(KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=4, dtype=torch.float32), 9, scratch=True)
    steps: list[StepContext] = []

    def forward(ids: torch.Tensor, positions: torch.Tensor, scored: torch.Tensor, step: StepContext) -> torch.Tensor:
        steps.append(step)
        return torch.zeros(len(scored), 1)

    bucket = DecodeBucket(3, 4, kv, TorchPlanner(4), "cpu")
    bucket.replay = bucket.padding_step(forward)
    for contexts, pages in (((14, 2), [[1, 2, 3, 4], [5, 0, 0, 0]]), ((5, 3), [[6, 7], [8, 0]]), ((1,), [[2]])):
        rows, table = len(contexts), torch.tensor(pages, dtype=torch.int32)
        last = torch.tensor(contexts) - 1
        slots = table.gather(1, (last // 4)[:, None])[:, 0] * 4 + last % 4
        starts = torch.arange(rows + 1, dtype=torch.int32)
        step = StepContext(starts, torch.tensor(contexts, dtype=torch.int32), table, slots, kv)
        batch = Batch(torch.zeros(1, rows, dtype=torch.int64), last[None], torch.arange(rows), step)
        bucket.prepare(batch)
        bucket.run(batch)
        expected = torch.zeros(3, 4, dtype=torch.int32)
        expected[:rows, : table.shape[1]] = table
        expected[rows:, 0] = 9  # the scratch page
        assert torch.equal(steps[-1].page_table, expected)


class Recorder(RepeatedCall):
    """Records the captured steps."""

    def __init__(self) -> None:
        self.captured = 0

    def capture(self, function: Any) -> Any:
        self.captured += 1
        return function

    def used_bytes(self) -> Any:
        return 1000 + 10 * self.captured


def test_the_largest_bucket_is_captured_first_and_memory_is_reported(model: Any, make_vocabulary: Any) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=4, dtype=torch.float32)
    seen = []
    runner = GraphRunner(
        model,
        97,
        KVCache(layout, 8, scratch=True),
        TorchPlanner(4),
        Recorder(),
        device="cpu",
        buckets=[1, 2, 4],
        max_pages=8,
        progress=lambda *step: seen.append(step),
    )
    assert seen == [(1, 3, "decode graphs"), (2, 3, "decode graphs"), (3, 3, "decode graphs")]
    assert [bucket.rows for bucket in runner.buckets] == [1, 2, 4]
    assert runner.graph_bytes == 30


def test_a_cache_without_scratch_page_is_refused(model: Any) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=4, dtype=torch.float32)
    with pytest.raises(ValueError, match="scratch page"):
        GraphRunner(
            model, 97, KVCache(layout, 8), TorchPlanner(4), RepeatedCall(), device="cpu", buckets=[1], max_pages=8
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_kernels_are_compiled_before_the_first_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing runs before, and what the functions are given later is not asked for if all was compiled already."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, asked = torch.ones(4, 512, device="cuda"), []

    def functions() -> Iterator[Function]:
        for columns in (512, 256):
            asked.append(columns)
            part = x[:, :columns]
            yield partial(lambda part: part.copy_(gated("silu", part.repeat(1, 2))), part)

    capturer = GraphCapturer("cuda")
    capturer.compile(functions())
    assert (x == 1).all() and asked == [512, 256]
    capturer.compile(functions())
    assert asked == [512, 256, 512]
    again = capturer.capture(next(functions()))
    x.fill_(1)
    again()
    torch.testing.assert_close(x, torch.nn.functional.silu(torch.ones_like(x)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_nothing_runs_any_more_when_a_step_has_failed() -> None:
    """It may have begun copies of experts on another stream."""
    copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def fail(**inputs: Any) -> Any:
        with torch.cuda.stream(copies):
            torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # cycles
        raise torch.OutOfMemoryError

    kv = KVCache(KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=4, dtype=torch.float32), 8, "cuda")
    runner = GraphRunner(fail, 97, kv, TorchPlanner(4), RepeatedCall(), device="cuda", buckets=[], max_pages=8)
    one, none = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    step = StepContext(torch.tensor([0, 1], dtype=torch.int32), one, one[None], none, kv)
    with pytest.raises(torch.OutOfMemoryError):
        runner.execute(Batch(none[None], none[None], none, step))
    assert copies.query()


def test_steps_that_only_decode_are_replayed(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=8, max_num_batched_tokens=16)
    for i in range(5):
        engine.add(f"r{i}", PROMPT[: i + 1], SamplingParams(temperature=0.0, max_tokens=9))
    results = run(engine)
    for i in range(5):
        assert results[f"r{i}", 0].token_ids == greedy(PROMPT[: i + 1], 9)
    decode = sum(rows == tokens == 5 for rows, tokens in model.steps)
    assert decode == 8 and engine.stats().replayed_steps == decode == engine.stats().steps - 1


def test_rows_that_ended_do_not_affect_the_next_steps(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=8)
    for i in range(8):
        engine.add(f"r{i}", PROMPT, SamplingParams(temperature=0.0, max_tokens=2 + 3 * (8 - i)))
    results = run(engine)
    for i in range(8):
        assert results[f"r{i}", 0].token_ids == greedy(PROMPT, 2 + 3 * (8 - i))


def test_a_step_never_has_more_rows_than_the_largest_bucket(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=3)
    for i in range(9):
        engine.add(f"r{i}", PROMPT, SamplingParams(temperature=0.0, max_tokens=4))
    results = run(engine)
    assert all(results[f"r{i}", 0].token_ids == greedy(PROMPT, 4) for i in range(9))


def choice_after(captured: float, eager: float, steps: int) -> tuple[CaptureChoice, list[bool]]:
    """Run steps of 64 rows that take so many seconds. Returns which of them were eager, too."""
    choice, taken = CaptureChoice(), []
    for _ in range(steps):
        taken.append(choice.is_eager(64))
        choice.learn(64, eager=taken[-1], seconds=eager if taken[-1] else captured)
    return choice, taken


@pytest.mark.parametrize(("captured", "eager"), [(0.2, 0.1), (0.1, 0.2)])
def test_the_faster_way_is_taken_once_both_were_tried_and_the_other_is_tried_again(
    captured: float, eager: float
) -> None:
    choice, taken = choice_after(captured, eager, 700)
    faster = eager < captured
    assert 0 < sum(taken[:20]) < 20 and taken[20:276] == [faster] * 256
    assert taken[276:279] == [not faster] * 3 and taken[279:500] == [faster] * 221
    for _ in range(600):  # the other way becomes ten times as fast
        now = choice.is_eager(64)
        choice.learn(64, eager=now, seconds=0.01 if now != faster else 0.3)
    assert choice.is_eager(64) != faster
    assert choice.is_eager(128) is False, "each size is compared on its own"


class DeviceModelRecorder:
    """A model with the optional methods of a device model. It records the calls."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: list[str] = []
        self.eager: list[bool] = []  # of each step, and of each capture

    def __call__(self, **arguments: Any) -> Any:
        self.calls.append("forward")
        self.eager.append(arguments["step"].live_tokens is None)
        return self.model(**arguments)

    def prepare_device(self, settings: Any) -> None:
        raise AssertionError("whoever builds the engine calls this, not the engine")

    def streams(self, tokens: int) -> bool:
        return tokens > 1

    def after_step(self) -> None:
        self.calls.append("after")

    def statistics(self) -> Any:
        return {"calls": len(self.calls)}

    def close(self) -> None:
        self.calls.append("close")


def test_decode_steps_that_may_stream_take_both_ways_and_the_same_tokens(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    streams = DeviceModelRecorder(model)
    engine = make_engine(streams, vocabulary, max_num_seqs=4)
    streams.eager.clear()
    for i in range(4):
        engine.add(f"r{i}", PROMPT[: i + 1], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    results = run(engine)
    assert all(results[f"r{i}", 0].token_ids == greedy(PROMPT[: i + 1], 60) for i in range(4))
    assert streams.eager[1:21] == [False] * 5 + [True] * 15, "one step is prepared before the choice"
    assert engine.stats().replayed_steps == streams.eager.count(False)


def test_without_graphs_everything_is_eager(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, cuda_graphs=False)
    engine.add("x", PROMPT, SamplingParams(temperature=0.0, max_tokens=9))
    assert run(engine)["x", 0].token_ids == greedy(PROMPT, 9)
    assert engine.stats().replayed_steps == 0 and engine.graph_bytes == 0


class Limited:
    """A model on a device with memory for a limited number of rows."""

    def __init__(self, model: Any, rows: Any) -> None:
        self.model, self.rows, self.refused = model, rows, 0

    def __call__(self, **arguments: Any) -> Any:
        if len(arguments["step"].context_lengths) > self.rows:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.model(**arguments)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_that_does_not_fit_in_memory_is_halved(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any, rows: Any
) -> None:
    limited = Limited(model, rows)
    engine = make_engine(limited, vocabulary, max_num_seqs=8, cuda_graphs=False)
    for i in range(8):
        engine.add(f"r{i}", PROMPT[: 1 + i], SamplingParams(temperature=0.0, max_tokens=6))
    results = run(engine)
    for i in range(8):
        assert results[f"r{i}", 0].token_ids == greedy(PROMPT[: 1 + i], 6)
    assert engine.stats().out_of_memory == limited.refused > 0
    assert max(step[0] for step in model.steps) <= rows


def test_a_sequence_that_does_not_fit_alone_fails_without_the_others(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, greedy: Any
) -> None:
    class Greedy:
        def __call__(self, **arguments: Any) -> Any:
            if (arguments["input_ids"] == 44).any():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return model(**arguments)

    engine = make_engine(Greedy(), vocabulary, max_num_seqs=4, cuda_graphs=False)
    engine.add("bad", [1, 44, 2], SamplingParams(temperature=0.0, max_tokens=3, n=2))
    engine.add("good", [1, 2], SamplingParams(temperature=0.0, max_tokens=3))
    results = run(engine)
    for index in (0, 1):
        assert results["bad", index].error.code == "engine_failure"
        assert "not enough GPU memory" in results["bad", index].error.message
    assert results["good", 0].token_ids == greedy([1, 2], 3)


class SmallSelector:
    """A selector that has memory for `limit` rows."""

    def __init__(self, selector: Selector, limit: int) -> None:
        self.selector, self.limit = selector, limit

    def select(
        self, logits: Any, rows: Any, sequences: Any, meanwhile: Any = do_nothing, masked: Any = None, ahead: Any = ()
    ) -> TokenSelection:
        if len(rows) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.selector.select(logits, rows, sequences, meanwhile, masked)


def test_choosing_in_halves_gives_the_same_tokens(
    make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    def answers(limit: int) -> Any:
        def with_little_memory(parts: EngineParts) -> EngineParts:
            return dataclasses.replace(parts, selector=SmallSelector(parts.selector, limit))

        engine = make_engine(make_model(), vocabulary, max_num_seqs=8, change_parts=with_little_memory)
        sampling = SamplingParams(temperature=1.0, max_tokens=8, logprobs=1, repetition_penalty=1.4, n=2)
        for i in range(4):
            engine.add(f"r{i}", PROMPT[: 1 + i], dataclasses.replace(sampling, seed=i))
        found = run(engine)
        assert (engine.stats().out_of_memory > 0) == (limit < 8)
        return {key: (result.token_ids, result.logprobs) for key, result in found.items()}

    assert answers(8) == answers(3) == answers(1)


def test_a_model_is_called_after_each_step(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any
) -> None:
    recorder = DeviceModelRecorder(model)
    engine = make_engine(recorder, vocabulary, max_num_batched_tokens=4, max_num_seqs=4)
    engine.add("x", PROMPT, SamplingParams(temperature=0.0, max_tokens=2))
    run(engine)
    assert engine.model_stats() == {"calls": 8}
    engine.close()
    assert recorder.calls == ["forward", "after"] * 4 + ["close"]


def test_a_gpu_needs_a_planner(model: Any, vocabulary: Any) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=4, dtype=torch.float32)
    with pytest.raises(ValueError, match="planner"):
        Engine(model, vocabulary, layout, EngineConfig(device="cuda"), 4, 16)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_demo_model_gives_the_same_tokens(graphs: Any, answered: Any) -> None:
    """Its operator is CpuDecoder, which the device's runner does not know."""
    loaded, tokenizer = load_model("demo"), load_tokenizer("demo")
    layout = loaded.kv_layout(16)
    answers = []
    for planner in (None, TorchPlanner(16)):
        config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=48, cuda_graphs=graphs)
        engine = Engine(loaded.module, tokenizer, layout, config, 64, 256, planner=planner)
        for i in range(6):
            prompt = list(range(3 + 40 * i % 97, 30 + 40 * i % 97))
            temperature = (0.0, 0.8, 1.0)[i % 3]
            engine.add(str(i), prompt, SamplingParams(temperature=temperature, top_p=0.9, seed=i, max_tokens=12))
        answers.append(answered(engine))
        assert (engine.stats().replayed_steps > 0) == (graphs and planner is not None)
    assert answers[0] == answers[1]
