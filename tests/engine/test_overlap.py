"""Decode steps whose halves take turns, on the CPU: what the halves are, when they run, and that nothing changes."""

from types import SimpleNamespace

import pytest
import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.bucket import Bucket
from ktqueue.engine.capture import Again
from ktqueue.engine.engine import Engine
from ktqueue.engine.graphs import GraphRunner, steps_to_capture
from ktqueue.engine.overlap import crossing, keys_to_overlap, trial_batch
from ktqueue.loading.load import load_model
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators.gpu.attention.torch import TorchPlanner
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.kv_cache import KVCache, KVLayout

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9]
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=4, dtype=torch.float32)


@pytest.fixture
def parts():
    return "device"


class ByParts:
    """A model that computes the parts of a step one by one, where there are any."""

    takes_turns = True

    def __init__(self, model):
        self.model, self.live = model, []

    def __call__(self, *, step, input_ids, position_ids, logits_to_keep, use_cache):
        if not step.parts:
            given = {"input_ids": input_ids, "position_ids": position_ids, "logits_to_keep": logits_to_keep}
            return self.model(**given, step=step, use_cache=use_cache)
        self.live.append([int(one.live_tokens) for one in (step, *step.parts)])
        logits, first = [], 0
        for part in step.parts:
            rows = slice(first, first + len(part.slot_mapping))
            first = rows.stop
            given = {"input_ids": input_ids[:, rows], "position_ids": position_ids[:, rows]}
            kept = torch.arange(rows.stop - rows.start)
            logits.append(self.model(**given, logits_to_keep=kept, step=part, use_cache=use_cache).logits)
        return SimpleNamespace(logits=torch.cat(logits, 1))

    def prepare_device(self, settings):
        raise AssertionError("the composition root calls this")

    def after_step(self):
        pass

    def statistics(self):
        return {}

    def close(self):
        pass


def test_halves_are_steps_of_their_own(model, vocabulary, make_engine, run, greedy):
    halving = ByParts(model)
    engine = make_engine(halving, vocabulary, max_num_seqs=7, two_batch_overlap="on")
    for i in range(7):
        engine.add(f"r{i}", PROMPT[: 1 + i], SamplingParams(temperature=0.0, max_tokens=2 + 2 * (7 - i)))
    results = run(engine)
    for i in range(7):
        assert results[f"r{i}", 0].token_ids == greedy(PROMPT[: 1 + i], 2 + 2 * (7 - i))
    live = halving.live
    assert [7, 4, 3] in live and [5, 4, 1] in live and [4, 2, 2] in live and [3, 2, 1] in live and [2, 1, 1] in live
    stats = engine.stats()
    assert len(live) == stats.overlapped_steps == stats.replayed_steps - 2  # one row is not cut


def test_a_model_that_cannot_is_given_no_halves(model, vocabulary, make_engine, run, greedy):
    engine = make_engine(model, vocabulary, max_num_seqs=4, two_batch_overlap="on")
    for i in range(4):
        engine.add(f"r{i}", PROMPT, SamplingParams(temperature=0.0, max_tokens=5))
    assert all(one.token_ids == greedy(PROMPT, 5) for one in run(engine).values())
    assert engine.stats().overlapped_steps == 0 < engine.stats().replayed_steps


def make_bucket(model, rows, kv, max_pages=8):
    def forward(input_ids, position_ids, scored, step):
        return model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=scored, step=step
        ).logits[0]

    return Bucket(rows, max_pages, kv, TorchPlanner(4), forward, Again(), "cpu")


def test_halves_run_from_so_many_keys_on(model):
    kv = KVCache(LAYOUT, 64, scratch=True)
    bucket = make_bucket(ByParts(model), 3, kv)
    few, many = (trial_batch(3, keys, kv, 90) for keys in (4, 5))
    for batch in (few, many):
        bucket.prepare(batch)
        assert not bucket.overlaps
    bucket.cut()
    for keys, expected in ((None, [False, False]), (13, [False, True]), (12, [True, True]), (16, [False, False])):
        bucket.overlapped_keys = keys
        for batch, halves in zip((few, many), expected, strict=True):
            bucket.prepare(batch)
            assert bucket.overlaps == halves
    many.step.context_lengths[0] = 1  # 11 keys together
    for keys, expected in ((12, False), (11, True)):
        bucket.overlapped_keys = keys
        bucket.prepare(many)
        assert bucket.overlaps == expected
    bucket.overlapped_keys = 0
    bucket.join()
    bucket.prepare(many)
    assert not bucket.overlaps


def test_padding_may_fill_a_half(model):
    """Then no row of it is real."""
    kv = KVCache(LAYOUT, 64, scratch=True)
    halving = ByParts(model)
    bucket = make_bucket(halving, 5, kv)
    bucket.cut()
    bucket.overlapped_keys = 0
    for rows in (1, 3, 4):
        batch = trial_batch(rows, 1, kv, 90)
        bucket.prepare(batch)
        given = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "logits_to_keep": batch.scored}
        torch.testing.assert_close(bucket.run(batch), model(**given, use_cache=False, step=batch.step).logits[0])
    assert halving.live == [[1, 1, 0], [3, 3, 0], [4, 3, 1]]


@pytest.mark.parametrize(
    ("overlap", "found", "keys"),
    [
        ("on", {}, [None, 0, 0, 0]),
        ("auto", {2: 0, 4: 500, 8: 900}, [None, 0, 500, 900]),
        ("auto", {2: 300, 4: None}, [None, 300, None, None]),  # and 8 is not tried
        ("auto", {2: None}, [None] * 4),
        ("off", {}, [None] * 4),
    ],
)
def test_what_is_cut(model, overlap, found, keys, monkeypatch):
    """As many rows as the trial says that it pays for, from two on; what does not pay is given up."""
    captured, kept = [], []

    class Recorder(Again):
        def capture(self, function):
            captured.append(function)
            return function

    def trial(bucket, *_):
        kept.append(bucket.rows)
        return found[bucket.rows]

    monkeypatch.setattr("ktqueue.engine.graphs.keys_to_overlap", trial)
    runner = GraphRunner(
        ByParts(model),
        97,
        KVCache(LAYOUT, 64, scratch=True),
        TorchPlanner(4),
        Recorder(),
        device="cpu",
        buckets=[1, 2, 4, 8],
        max_pages=8,
        overlap=overlap,
    )
    assert kept == list(found)
    assert [one.overlapped_keys for one in runner._graphs] == keys
    assert [one._halves is not None for one in runner._graphs] == [one is not None for one in keys]
    assert len(captured) == 4 + (3 if overlap == "on" else len(found)) <= steps_to_capture(8, overlap=overlap)
    assert steps_to_capture(8, overlap=overlap) == (4 if overlap == "off" else 7)


@pytest.mark.parametrize("overlap", ["on", "auto"])
def test_halves_for_which_there_is_no_memory(model, overlap, monkeypatch, caplog):
    """Steps stay whole, unless halves were asked for."""
    halving = ByParts(model)

    class Full(Again):
        """After five captured steps."""

        left = 5

        def capture(self, function):
            if self.left == 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.left -= 1
            return function

    def make():
        kv = KVCache(LAYOUT, 64, scratch=True)
        given = {"device": "cpu", "buckets": [1, 2, 4, 8], "max_pages": 8, "overlap": overlap}
        return GraphRunner(halving, 97, kv, TorchPlanner(4), Full(), **given), kv

    monkeypatch.setattr("ktqueue.engine.graphs.keys_to_overlap", lambda *_: 0)
    if overlap == "on":
        with pytest.raises(torch.OutOfMemoryError):
            make()
        return
    runner, kv = make()
    assert "decode steps of 4 rows and more run whole: CUDA out of memory" in caplog.text
    for rows in (2, 3, 8):
        batch = trial_batch(rows, 1, kv, 90)
        assert runner.execute(batch).shape == (rows, 97)
        assert runner.overlapped == 1


def test_on_a_cpu_nothing_is_tried(model, vocabulary, make_engine, run, monkeypatch):
    monkeypatch.setattr("ktqueue.engine.graphs.keys_to_overlap", lambda *_: pytest.fail("nothing can be won"))
    engine = make_engine(ByParts(model), vocabulary, max_num_seqs=4, two_batch_overlap="auto")
    engine.add("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=3))
    run(engine)
    assert engine.stats().overlapped_steps == 0 < engine.stats().replayed_steps


class Slow:
    """A model whose steps take seconds(keys of all rows, whether in halves) on a device that nobody waits for but by
    `wait`; `clock` tells the seconds that were waited."""

    takes_turns = True

    def __init__(self, seconds):
        self.seconds, self.steps, self.now, self.under_way = seconds, [], 0.0, 0.0

    def __call__(self, *, step, input_ids, position_ids, logits_to_keep, use_cache):
        lengths = step.context_lengths.tolist()
        assert int(step.live_tokens) == len(lengths)
        self.steps.append((lengths, len(step.parts)))
        self.under_way += self.seconds(sum(lengths), bool(step.parts))
        return SimpleNamespace(logits=torch.zeros(1, len(lengths), 97))

    def wait(self):
        self.now += self.under_way
        self.under_way = 0.0

    def clock(self):
        return self.now


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda keys, halves: 0.9 if halves else 1.0, 0),
        (lambda keys, halves: 0.98 if halves else 1.0, None),  # too near
        (lambda keys, halves: 0.97 + (800 - keys) / 1e4 if halves else 1.0, 800),
        (lambda keys, halves: 0.97 - (800 - keys) / 1e4 if halves else 1.0, None),  # in short contexts only
    ],
)
@pytest.mark.parametrize("disturbed", [(), (0, 2), (1, 3)])
def test_both_ways_are_tried(seconds, expected, disturbed):
    """In contexts of 128 keys a row and of 397, in turns; some steps take longer than they should."""
    slow = Slow(lambda *how: seconds(*how) + (5.0 if len(slow.steps) % 10 in disturbed else 0.0))
    kv = KVCache(LAYOUT, 400, scratch=True)
    bucket = make_bucket(slow, 3, kv, max_pages=100)
    bucket.cut()
    assert keys_to_overlap(bucket, kv, 90, slow.wait, clock=slow.clock) == expected
    assert slow.steps == [([keys] * 3, parts) for keys in (128, 397) for _ in range(5) for parts in (0, 2)]


@pytest.mark.parametrize(("pages", "max_pages", "keys"), [(31, 100, 37), (400, 6, 21), (3, 100, 1), (2, 100, None)])
def test_a_trial_has_room_in_any_cache(pages, max_pages, keys):
    slow = Slow(lambda keys, halves: 1.0)
    kv = KVCache(LAYOUT, pages, scratch=True)
    bucket = make_bucket(slow, 3, kv, max_pages)
    bucket.cut()
    assert keys_to_overlap(bucket, kv, 90, slow.wait, clock=slow.clock) is None
    assert {tuple(lengths) for lengths, _ in slow.steps} == ({(keys,) * 3} if keys else set())


@pytest.mark.parametrize(
    ("gains", "expected"),
    [([1.0, 2.0], 0), ([-1.0, 3.0], 400 + 1600 // 4), ([-1.0, 0.0], None), ([2.0, -1.0], None), ([0.0, 1.0], 400)],
)
def test_where_halves_begin_to_gain(gains, expected):
    assert crossing([400, 2000], gains) == expected


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (3, 4), (5, 9)])
def test_a_trial_is_a_step_like_any_other(model, rows, keys):
    kv = KVCache(LAYOUT, 16, scratch=True)
    batch = trial_batch(rows, keys, kv, 90)
    assert batch.decodes
    table = batch.step.page_table.long()
    assert len(table.unique()) == table.numel() == rows * -(-keys // 4)
    for at in range(keys - 1):  # the model asserts what a step must be, and reads all keys before
        kv.write(0, 4 * table[:, at // 4] + at % 4, *(torch.full((rows, 1, 1), value) for value in (7.0, float(at))))
    given = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "logits_to_keep": batch.scored}
    assert model(**given, use_cache=False, step=batch.step).logits.shape == (1, rows, 97)


@pytest.mark.parametrize(("memory", "fetched", "keys"), [(0, 0.0, 0), (2 << 20, 0.0, 150), (0, 0.5, 150)])
def test_the_demo_model_says_the_same(by_decoder, answered, memory, fetched, keys):
    """Rows come and go, some experts are on the other side, some come to the step; steps are whole or in halves, in any
    order."""
    loaded, tokenizer = load_model("demo", rules=by_decoder), load_tokenizer("demo")
    answers = []
    for overlap in ("on", "off"):
        streaming = "auto" if fetched else "off"
        settings = GpuSettings(
            max_tokens=64, expert_memory_bytes=memory, expert_streaming=streaming, fetched_share=fetched
        )
        loaded.module.prepare_device(settings)
        config = EngineConfig(max_num_seqs=6, max_num_batched_tokens=48, two_batch_overlap=overlap)
        engine = Engine(loaded.module, tokenizer, loaded.kv_layout(16), config, 64, 256, planner=TorchPlanner(16))
        for bucket in engine._runner._graphs[1:]:
            bucket.overlapped_keys = keys
        for i in range(6):
            prompt = list(range(3 + 40 * i % 97, 30 + 40 * i % 97))
            temperature = (0.0, 0.8)[i % 2]
            engine.add(str(i), prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=8 + 2 * i))
        answers.append(answered(engine))
        stats = engine.stats()
        assert (stats.overlapped_steps > 0) == (overlap == "on")
        assert keys == 0 or stats.overlapped_steps < stats.replayed_steps - 4  # the last ones have one row
        engine.close()
    assert answers[0] == answers[1]
