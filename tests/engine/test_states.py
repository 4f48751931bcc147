"""Sequences with states: slots are counted, snapshots are shared, and no step reads what another step overwrote.

The model is a random Qwen3-Next, on the engine's parts for the host and on those for a device, which is the CPU here.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_families import LINEAR
from endless_vocabulary import NoEnd
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.engine_parts import EngineParts, make_parts
from ktqueue.engine.gpu.device_selector import DeviceSelector
from ktqueue.engine.outputs import EmittedChoice
from ktqueue.loading.load import LoadedModel, load_model
from ktqueue.operators.gpu.attention.backends import make_planner
from ktqueue.operators.gpu.settings import GpuSettings

VOCAB = 128
PAGE = 16
PROMPT = [i * 37 % VOCAB for i in range(200)]
NEW_TOKENS = 40
SAMPLING = SamplingParams(temperature=1.0, seed=3, max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    make_config: Any = Qwen3NextConfig
    config = make_config(
        **LINEAR,
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(4)
    made: Any = Qwen3NextForCausalLM
    path = tmp_path_factory.mktemp("states")
    made(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=["host", "device"])
def loaded(request: Any, folder: str, tmp_path_factory: Any) -> LoadedModel:
    if request.param == "host":
        return load_model(folder)
    rules = tmp_path_factory.mktemp("rules") / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n")
    model = load_model(folder, rules=str(rules))
    prepared: Any = model.module
    prepared.prepare_device(GpuSettings(max_tokens=512, expert_memory_bytes=1 << 40))
    return model


@pytest.fixture(scope="module")
def make_engine(loaded: LoadedModel) -> Callable[..., Engine]:
    """make_engine(pages=..., **EngineConfig fields)."""

    def make(pages: int = 200, change: Callable[[Any], Any] = lambda parts: parts, **settings: Any) -> Engine:
        layout, vocabulary = loaded.kv_layout(PAGE), NoEnd(VOCAB)
        config = EngineConfig(page_size=PAGE, **{"max_num_seqs": 8, "max_num_batched_tokens": 64, **settings})
        facts, planner = loaded.attention, None
        if type(loaded.module).__name__ == "GpuDecoder":
            planner = make_planner(
                layout, heads=facts.heads, scaling=facts.scaling, windows=facts.windows, device="cpu"
            )
        parts = make_parts(loaded.module, vocabulary, layout, config, pages, 2048, planner, None)
        return Engine(loaded.module, vocabulary, layout, config, pages, 2048, parts=change(parts))

    return make


def finish(engine: Engine, *, ahead: bool = True) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step(lambda: ahead):
            assert output.error is None
            found.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        engine.check()
    return found


@pytest.fixture(scope="module")
def alone(make_engine: Callable[..., Engine]) -> list[int]:
    """What follows PROMPT, from an engine that does nothing else."""
    engine = make_engine(enable_prefix_caching=False)
    engine.add("a", PROMPT, SAMPLING)
    return finish(engine)["a", 0]


def test_choices_share_the_state_of_their_prompt(make_engine: Callable[..., Engine], alone: list[int]) -> None:
    engine = make_engine()
    engine.add("a", PROMPT, dataclasses.replace(SAMPLING, n=3))
    together = finish(engine)
    assert together["a", 0] == alone and len({tuple(tokens) for tokens in together.values()}) == 3
    for index in (1, 2):  # each as if the other choices had been finished before
        engine.add("b", PROMPT, dataclasses.replace(SAMPLING, n=3), emitted=emitted_but(index))
        assert finish(engine)["b", index] == together["a", index]


def emitted_but(index: int) -> list[EmittedChoice]:
    finished = EmittedChoice(token_ids=(1,) * NEW_TOKENS, text_length=NEW_TOKENS)
    return [EmittedChoice() if i == index else finished for i in range(3)]


def test_a_prompt_is_computed_from_the_snapshot_at_its_last_page(
    make_engine: Callable[..., Engine], alone: list[int]
) -> None:
    engine = make_engine()
    for name in ("a", "b"):
        before = engine.stats().prefix_hits
        engine.add(name, PROMPT, SAMPLING)
        assert finish(engine)[name, 0] == alone
    assert engine.stats().prefix_hits - before == 192  # the last full page before the last token
    longer = [*PROMPT, *alone, 5, 6, 7]
    engine.add("c", longer, SAMPLING)
    found = finish(engine)["c", 0]
    fresh = make_engine(enable_prefix_caching=False)
    fresh.add("c", longer, SAMPLING)
    assert found == finish(fresh)["c", 0]
    assert engine.stats().prefix_hits - before > 2 * 192 - 1


@pytest.mark.parametrize("emitted", [1, 17, 39])
def test_choices_resume_at_the_next_token(make_engine: Callable[..., Engine], alone: list[int], emitted: int) -> None:
    engine = make_engine()
    choices = [EmittedChoice(token_ids=tuple(alone[:emitted]), text_length=emitted), EmittedChoice()]
    engine.add("a", PROMPT, dataclasses.replace(SAMPLING, n=2), emitted=choices)
    found = finish(engine)
    fresh = make_engine()
    fresh.add("a", PROMPT, dataclasses.replace(SAMPLING, n=2))
    other = finish(fresh)
    assert found["a", 0] == alone[emitted:] and found["a", 1] == other["a", 1]


@pytest.mark.parametrize(("candidates", "pages"), [(26, 24), (1024, 200)])
def test_steps_that_are_launched_ahead_change_no_state(
    make_engine: Callable[..., Engine],
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    candidates: int,
    pages: int,
) -> None:
    """With 26 candidates some tokens are drawn again. Then the step that was launched with others is repeated."""
    monkeypatch.setattr("ktqueue.engine.prepared_step.STEPS_AFTER_REDRAW", 0)
    on_device = type(loaded.module).__name__ == "GpuDecoder"

    def with_candidates(parts: EngineParts) -> EngineParts:
        selector = DeviceSelector(lambda token_id: b"", "cpu", candidates=candidates)
        return dataclasses.replace(parts, selector=selector) if on_device else parts

    answers = []
    for ahead in (False, True):
        engine = make_engine(pages, change=with_candidates, interactive_step_ms=0)
        noise = random.Random(5)
        for i in range(9):
            stops = tuple(noise.sample(range(VOCAB), 4))
            filters = ({"top_p": 0.6}, {"top_k": 9}, {}, {"temperature": 0.0})[i % 4]
            chosen: dict[str, Any] = {
                "temperature": 1.0,
                "seed": i,
                "max_tokens": 20 + 5 * i,
                "stop_token_ids": stops,
                **filters,
            }
            engine.add(str(i), [*PROMPT[: 15 * i], i], SamplingParams(**chosen))
        answers.append(finish(engine, ahead=ahead))
        assert (engine.stats().steps_ahead > 0) == (ahead and on_device)
        assert engine.stats().preemptions > 0 or pages == 200
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def without_drafts(loaded: LoadedModel) -> dict[int, dict[tuple[str, int], list[int]]]:
    """The answers of the next test without drafts, by the number of rows: with many pages and without a fault."""
    return {}


@pytest.mark.parametrize(("pages", "rows", "fails"), [(24, 8, False), (200, 8, True), (200, 1, False)])
def test_wrong_drafts_change_no_state(
    make_engine: Callable[..., Engine],
    without_drafts: dict[int, dict[tuple[str, int], list[int]]],
    pages: int,
    rows: int,
    fails: bool,
) -> None:
    """Of three drafts a row some are right. The state is that after the last right one: of choices, after preemption,
    from snapshots, and after a step that failed."""

    def change(parts: Any) -> Any:
        return dataclasses.replace(parts, runner=FailsOnce(parts.runner)) if fails else parts

    def answer(engine: Engine) -> dict[tuple[str, int], list[int]]:
        for i in range(9):
            sampling = SamplingParams(
                temperature=float(i % 2),
                seed=i,
                max_tokens=20 + 5 * i,
                n=1 + (i % 3 == 2 and rows > 1),
                stop_token_ids=(i, i + 40, i + 80),
            )
            engine.add(str(i), [*PROMPT[: 15 * i], i][-(30 + 16 * i) :], sampling)
        return finish(engine)

    if rows not in without_drafts:
        plain = make_engine(200, interactive_step_ms=0, speculation="off", max_num_seqs=rows)
        without_drafts[rows] = answer(plain)
    known, noise = without_drafts[rows], random.Random(6)

    def make(counts: Any) -> Any:
        """The known answer, with some wrong tokens in it."""
        return {
            one: [
                (token + (noise.random() < 0.3)) % VOCAB
                for token in [*known[one.request.id, one.index][one.generated :], 0, 1, 2][:count]
            ]
            for one, count in counts.items()
        }

    engine = make_engine(pages, change, interactive_step_ms=0, speculation="lookup", max_num_seqs=rows)
    engine.drafts._make = make  # type: ignore[method-assign]
    engine.drafts.probed = 3
    assert answer(engine) == known
    stats = engine.stats()
    assert stats.preemptions > 0 or pages == 200 or rows == 1
    assert stats.out_of_memory == fails
    assert 100 < stats.accepted_tokens < 0.8 * stats.drafted_tokens
    states: Any = engine._rows.states
    assert states._slots.available == states._slots.total


def test_preempted_sequences_continue(make_engine: Callable[..., Engine], alone: list[int]) -> None:
    engine = make_engine(pages=40)
    for i in range(6):
        engine.add(str(i), PROMPT if i == 3 else [i, *PROMPT[: 30 * i + 10]], dataclasses.replace(SAMPLING, seed=3))
    found = finish(engine)
    assert engine.stats().preemptions > 0
    assert found["3", 0] == alone


class FailsOnce:
    """A runner that changes every state and then runs out of memory, in its third step with several rows."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def prepare(self, batch: Any) -> bool:
        """Nothing: a step that is prepared takes no memory."""
        return False

    def execute(self, batch: Any) -> torch.Tensor:
        rows = len(batch.step.context_lengths)
        logits: torch.Tensor = self._runner.execute(batch)
        self.steps += rows > 1
        if rows > 1 and self.steps == 3:
            raise torch.OutOfMemoryError("as asked")
        return logits


def test_no_state_of_a_failed_step_is_used(make_engine: Callable[..., Engine], alone: list[int]) -> None:
    requests = {"a": PROMPT, "b": PROMPT[:50], "c": PROMPT[5:60]}
    expected, disturbed = (
        make_engine(),
        make_engine(change=lambda parts: dataclasses.replace(parts, runner=FailsOnce(parts.runner))),
    )
    for engine in (expected, disturbed):
        for name, prompt in requests.items():
            engine.add(name, prompt, SAMPLING)
    assert finish(disturbed) == finish(expected)
    assert disturbed.stats().out_of_memory == 1


def test_snapshots_are_evicted_before_a_slot_is_lacking(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_num_seqs=2)
    prompts = [[i, *PROMPT] for i in range(9)]
    sampling = dataclasses.replace(SAMPLING, max_tokens=20)  # past the end of a page
    first: list[list[int]] = []
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            engine.add(f"{turn}-{i}", prompt, sampling)
        found = finish(engine)
        answers = [found[f"{turn}-{i}", 0] for i in range(len(prompts))]
        first = first or answers
        assert answers == first


def test_prompts_that_arrive_together_wait_for_a_snapshot(make_engine: Callable[..., Engine], alone: list[int]) -> None:
    """Their common prefix is computed once, if a snapshot is kept where it ends."""
    engine = make_engine(max_num_batched_tokens=512)
    for name in "abc":
        engine.add(name, PROMPT, SAMPLING, job_class=JobClass.BATCH)
    engine.add("d", [*PROMPT[:100], 7], SAMPLING, job_class=JobClass.BATCH)  # no snapshot will be of use to it
    assert {output.request_id for output in engine.step()} == {"d"}
    firsts = {output.request_id: list(output.token_ids) for output in engine.step()}
    assert engine.stats().prefix_hits == 2 * 192
    rest = finish(engine)
    assert all(firsts[name] + rest[name, 0] == alone for name in "abc")
