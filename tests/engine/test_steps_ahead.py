"""Steps that are launched before the host has the tokens of the step before change no answer: docs/adr/0058."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from engine_workload import outputs_of_steps, workload

from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.engine_parts import EngineParts
from ktqueue.engine.gpu.device_selector import DeviceSelector
from ktqueue.engine.shared_steps import SharedSteps
from ktqueue.engine.token_selector import Selector, TokenSelection

PROMPT = [5, 9, 2, 44, 17, 3, 80, 21, 9]
FEW = 4  # candidates: so few that many rows are drawn again


@pytest.fixture
def parts() -> Any:
    return "device"


class CountingSelector:
    """Counts the selections in which a token was drawn again."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.redrawn = 0

    def select(self, *arguments: Any) -> TokenSelection:
        selection = self.selector.select(*arguments)
        self.redrawn += selection.redrawn
        return selection


def greedily(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, **{"ignore_eos": True, **more})


@pytest.mark.parametrize("pages", [400, 18])
@pytest.mark.parametrize("seed", [0, 3])  # with graphs; a prefix cache with even ones
def test_answers_stay_the_same(
    make_crowded: Any,
    gather_outputs: Any,
    compile_grammar: Any,
    vocabulary: Any,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    pages: int,
) -> None:
    """Requests that arrive meanwhile join later, so the steps differ, but the answers do not."""
    turns = workload(seed)
    aborted = {name for aborts, _ in turns for name in aborts}
    noise = random.Random(seed)
    answers, ahead, redrawn = [], [], []
    for way in ("never", "after the tokens", "always", "sometimes", "with few candidates"):
        selectors: list[CountingSelector] = []

        def count(parts: EngineParts, way: str = way, made: list[CountingSelector] = selectors) -> EngineParts:
            few = DeviceSelector(vocabulary.token_bytes, "cpu", candidates=FEW)
            made.append(CountingSelector(few if way == "with few candidates" else parts.selector))
            return dataclasses.replace(parts, selector=made[0])

        def launch_next(way: str = way) -> bool:
            return way != "never" and (way != "sometimes" or noise.random() < 0.5)

        with monkeypatch.context() as patch:
            patch.setattr("ktqueue.engine.prepared_step.STEPS_AFTER_REDRAW", 0)
            if way == "after the tokens":
                patch.setattr(SharedSteps, "may_launch_ahead", lambda *_: False)
            engine = make_crowded(seed, pages, change_parts=count)
            results: dict[Any, Any] = {}
            for outputs in outputs_of_steps(engine, turns, compile_grammar, launch_next):
                gather_outputs(results, outputs)
        answers.append(
            {
                key: (result.token_ids, result.text, result.logprobs, result.finish_reason, result.error)
                for key, result in results.items()
                if key[0] not in aborted
            }
        )
        ahead.append(engine.stats().steps_ahead)
        redrawn.append(selectors[0].redrawn)
    assert all(other == answers[0] for other in answers[1:])
    assert any(error is not None for *_, error in answers[0].values())
    assert ahead[:2] == [0, 0] and ahead[2] > 0
    assert pages == 18 or (ahead[2] > ahead[3] > 5 and ahead[2] > ahead[4] > 5)
    assert redrawn[:4] == [0, 0, 0, 0] and redrawn[4] > 3


def test_all_steps_that_only_decode_are_launched_ahead(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], greedy: Any
) -> None:
    """Rows that reach their last token are left out, and rows that stop before compute one token in vain."""
    stop = greedy(PROMPT[:5], 9)[-1]
    engine = make_engine(model, vocabulary, max_num_seqs=4)
    engine.add("long", PROMPT, greedily(20))
    engine.add("short", PROMPT[:4], greedily(7))
    engine.add("stops", PROMPT[:5], greedily(20, stop_token_ids=(stop,)))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step(lambda: True):
            found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    assert found == {"long": greedy(PROMPT, 20), "short": greedy(PROMPT[:4], 7), "stops": greedy(PROMPT[:5], 9)}
    stats = engine.stats()
    assert stats.steps == 20 and stats.steps_ahead == stats.prepared_steps == 19
    tokens = sum(map(len, found.values()))
    assert model.computed_tokens == len(PROMPT) + 4 + 5 + tokens - 3 + 1
    assert stats.generation_tokens == tokens


def test_a_request_joins_after_the_step_that_was_launched(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=4)
    engine.add("first", PROMPT, greedily(20))
    engine.step(lambda: True)
    engine.add("second", PROMPT[:3], greedily(5))
    assert [output.request_id for output in engine.step(lambda: True)] == ["first"]
    outputs = engine.step(lambda: True)
    assert {output.request_id: output.token_ids for output in outputs} == {
        "first": tuple(greedy(PROMPT, 3)[2:]),
        "second": tuple(greedy(PROMPT[:3], 1)),
    }


def test_a_step_is_dropped_if_all_its_rows_have_ended(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], greedy: Any
) -> None:
    engine = make_engine(model, vocabulary)
    stop = greedy(PROMPT, 4)[-1]
    engine.add("stops", PROMPT, greedily(20, stop_token_ids=(stop,)))
    while engine.has_work:
        engine.step(lambda: True)
    steps = engine.stats().steps
    assert steps == 4 and len(model.steps) == 5
    engine.add("next", PROMPT[:3], greedily(5))
    assert engine.step(lambda: True)[0].token_ids == tuple(greedy(PROMPT[:3], 1))
    assert engine.stats().steps == steps + 1


def test_nothing_is_launched_ahead_while_a_request_waits_for_a_row_that_ends(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], greedy: Any
) -> None:
    engine = make_engine(model, vocabulary, max_num_seqs=2)
    for name, count in (("a", 20), ("b", 3), ("c", 5)):
        engine.add(name, PROMPT[: 3 + count % 4], greedily(count))
    steps = [{output.request_id for output in engine.step(lambda: True)} for _ in range(4)]
    assert steps == [{"a", "b"}, {"a", "b"}, {"a", "b"}, {"a", "c"}]


def test_nothing_is_launched_ahead_while_other_rows_need_their_logits(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are sampled one by one, and only the first one is in the next step."""
    monkeypatch.setattr("ktqueue.engine.step_sampler.SAMPLED_ROWS", 1)
    engine = make_engine(model, vocabulary)
    engine.add("first", PROMPT, greedily(6))
    engine.add("second", PROMPT[:3], greedily(3))
    steps = [{output.request_id: output.token_ids[0] for output in engine.step(lambda: True)} for _ in range(6)]
    assert [step["first"] for step in steps] == greedy(PROMPT, 6)
    assert [step["second"] for step in steps[:3]] == greedy(PROMPT[:3], 3)
    assert engine.stats().steps_ahead == 2


def test_a_step_that_takes_long_is_not_launched_ahead(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(model, vocabulary, interactive_step_ms=200)
    engine.costs.observe(1, 0.05)
    engine.add("x", PROMPT, greedily(20), job_class=JobClass.INTERACTIVE)
    engine.costs.observe = lambda *_: None  # type: ignore[method-assign]
    for _ in range(5):
        engine.step(lambda: True)
    assert engine.stats().steps_ahead == 0 and engine.stats().prepared_steps == 4
    assert len(model.steps) == 6, "it is launched once the tokens are known"
