"""Interactive sequences have steps while a step of the batch class is computed, and no token changes.

Each test also runs on CPU tensors, where a step is overlapped layer by layer.
"""

import random
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from device_engine import few_on_the_cpu, on_device

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine import overlap
from ktqueue.engine.batch import Batch
from ktqueue.engine.batch_loss import BatchLoss, Beside
from ktqueue.engine.engine import Engine
from ktqueue.engine.gpu.graph_runner import GraphRunner
from ktqueue.engine.gpu.parted_step import PartedStep
from ktqueue.engine.outputs import SequenceOutput
from ktqueue.loading.load import load_model
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.step import StepInputs
from ktqueue.workers.startup import gpu_memory
from ktqueue.workers.startup.step_probes import probe_steps

pytestmark = pytest.mark.usefixtures("small_steps_overlap")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCABULARY = 512
Asked = dict[str, tuple[list[int], SamplingParams, JobClass]]


def engine_of(small_experts: str, rules: str, device: str, **given: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": 40, "max_num_batched_tokens": 256, "num_pages": 400}
    config = EngineConfig(device=device, dtype="float32", speculation="off", **settings | given)
    return on_device(load_model(small_experts, rules=rules, device=device, dtype=torch.float32), config)


@pytest.fixture
def make_engine(small_experts: str, by_decoder: str) -> Iterator[Any]:
    made: list[Engine] = []

    def make(device: str, **given: Any) -> Engine:
        made.append(engine_of(small_experts, by_decoder, device, **given))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def asked_for(count: int, batch: int, seed: int = 1, tokens: int = 24) -> Asked:
    """Requests by id. The first `batch` are of the batch class, the others are interactive. Some are sampled."""
    noise = random.Random(seed)
    made: Asked = {}
    for number in range(count):
        prompt = [noise.randrange(VOCABULARY) for _ in range(noise.randrange(2, 60))]
        drawn: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95} if number % 2 else {"temperature": 0.0}
        job_class = JobClass.BATCH if number < batch else JobClass.INTERACTIVE
        made[str(number)] = prompt, SamplingParams(seed=number, max_tokens=tokens, **drawn), job_class
    return made


def run(
    engine: Engine, asked: Asked, arrivals: int, aborts: dict[int, list[str]] | None = None
) -> dict[str, list[int]]:
    """The tokens of each request. The batch is there from the beginning, `arrivals` others come before each step.
    aborts: ids by the number of the step before which they are aborted."""
    found: dict[str, list[int]] = {name: [] for name in asked}
    waiting = sorted(asked, key=lambda name: asked[name][2] is JobClass.INTERACTIVE)
    batch = [name for name in waiting if asked[name][2] is JobClass.BATCH]
    waiting = waiting[len(batch) :]
    for name in batch:
        engine.add(name, *asked[name][:2], job_class=JobClass.BATCH)
    step = 0
    while waiting or engine.has_work:
        for name in waiting[:arrivals]:
            engine.add(name, *asked[name][:2])
        del waiting[:arrivals]
        for name in (aborts or {}).get(step, []):
            engine.abort(name)
        for output in engine.step():
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
        engine.check()
        step += 1
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages
    return found


@pytest.fixture(scope="module")
def alone(small_experts: str, by_decoder: str) -> Any:
    """The tokens of requests in an engine without classes, by device. Call it before anything is patched."""
    known: dict[str, dict[str, list[int]]] = {}

    def of(device: str, asked: Asked) -> dict[str, list[int]]:
        name = f"{device} {asked}"
        if name not in known:
            engine = engine_of(small_experts, by_decoder, device, interactive_step_ms=0)
            known[name] = run(engine, asked, 100)
            engine.close()
        return known[name]

    return of


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_both_classes_get_the_tokens_that_they_get_alone(
    device: str, graphs: bool, make_engine: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short steps fetch half of their experts to memory that the overlapped step uses, unless they are told not to."""
    asked = asked_for(46, 30)
    expected = alone(device, asked)
    monkeypatch.setattr(gpu_memory, "GpuSettings", partial(GpuSettings, fetched_shares=(0.5, 0.5)))
    engine = make_engine(device, cuda_graphs=graphs)
    assert run(engine, asked, 1) == expected
    assert engine.stats().overlapped_steps > 5


@pytest.mark.parametrize("borne", [Beside.NOTHING, Beside.PROMPTS], ids=lambda borne: borne.name)
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_stay_the_same_while_they_ride(
    device: str, borne: Beside, make_engine: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_for(60, 36, seed=4)
    expected = alone(device, asked)
    monkeypatch.setattr(BatchLoss, "borne", borne)
    monkeypatch.setattr(overlap, "PROMPT_WAITS_SECONDS", -1e9)  # no prompt waits for the next step
    engine = make_engine(device)
    assert run(engine, asked, 1) == expected
    assert engine.stats().overlapped_steps > 5


def until_the_batch(engine: Engine, name: str) -> tuple[int, int]:
    """Run steps until the batch class gets tokens. Returns how many a request got before, and how many with them."""
    seen = 0
    while True:
        outputs = engine.step()
        now = sum(len(output.token_ids) for output in outputs if output.request_id == name)
        if any(output.request_id.isdecimal() for output in outputs):
            return seen, now
        seen += now


@pytest.mark.parametrize("borne", list(Beside), ids=lambda borne: borne.name)
def test_a_request_that_arrives_during_a_step_takes_a_row_that_was_left(
    borne: Beside, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch class has all rows before the others come."""
    monkeypatch.setattr(BatchLoss, "borne", borne)
    monkeypatch.setattr(overlap, "PROMPT_WAITS_SECONDS", -1e9)
    engine = make_engine("cpu")
    asked = SamplingParams(max_tokens=40, temperature=0.0)
    for name in range(60):
        engine.add(f"{name}", [name, 1, 2], asked, job_class=JobClass.BATCH)
    engine.step()
    assert engine.stats().running == 40
    engine.add("early", [3, 1, 2], asked)
    while engine.stats().overlapped_steps < 2:
        engine.step()
    if borne is not Beside.ALL:
        assert until_the_batch(engine, "early") == (0, 1), "its token rides"
    engine.step()  # the next overlapped step begins
    engine.add("late", [7, 8, 9, 10], asked)
    before, with_batch = until_the_batch(engine, "late")
    assert (before + with_batch > 0) == (borne > Beside.NOTHING)


def test_steps_overlap_at_start_up_and_leave_nothing_in_the_cache(make_engine: Any) -> None:
    """What such steps compile, no request waits for."""
    engine = make_engine("cpu")
    probe_steps(engine, VOCABULARY, full_step=256)
    assert engine._overlap.steps > 0 and not engine.has_work
    assert engine.stats().overlapped_steps == 0  # they are no statistics
    assert not engine._rows.pages._page_of


def test_rows_that_an_overlapped_step_leaves_out_take_turns(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """38 rows of a batch run when a chat arrives. A step has 35 of 40 rows then, and the chat rides in one."""
    monkeypatch.setattr(BatchLoss, "borne", Beside.NOTHING)
    engine = make_engine("cpu")
    asked = SamplingParams(max_tokens=80, temperature=0.0)
    for name in range(38):
        engine.add(f"{name}", [name, 1, 2], asked, job_class=JobClass.BATCH)
    given: dict[str, int] = {}

    def run_until(tokens: int) -> None:
        while max(given.values(), default=0) < tokens:
            for output in engine.step():
                given[output.request_id] = given.get(output.request_id, 0) + len(output.token_ids)

    run_until(2)
    assert len(given) == 38
    engine.add("chat", [7, 8, 9], asked)
    run_until(52)
    assert len(given) == 39 and min(given.values()) >= 42


@pytest.mark.parametrize("borne", [Beside.NOTHING, Beside.ALL], ids=lambda borne: borne.name)
def test_a_loss_is_held_against_steps_beside_which_nothing_ran(
    borne: Beside, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overlapped step ran alone exactly if nothing may run beside it: a chat runs all the time."""
    monkeypatch.setattr(BatchLoss, "borne", borne)
    were_alone: list[bool] = []
    monkeypatch.setattr(BatchLoss, "note", lambda loss, *_, is_alone: were_alone.append(is_alone))
    engine = make_engine("cpu")
    asked = SamplingParams(max_tokens=24, temperature=0.0)
    for name in range(30):
        engine.add(f"{name}", [name, 1, 2], asked, job_class=JobClass.BATCH)
    engine.add("chat", [7, 8, 9], asked)
    while not any(output.request_id == "chat" and output.finish_reason for output in engine.step()):
        pass
    assert len(were_alone) > 3
    assert set(were_alone[1:]) == {borne is Beside.NOTHING}  # in the first one all prompts ride


@pytest.mark.parametrize("device", DEVICES)
def test_experts_move_between_overlapped_steps(device: str, make_engine: Any, alone: Any) -> None:
    """Half of the experts are in GPU memory. Those that move are on their way when a step begins."""
    asked = asked_for(66, 30, tokens=32)
    engine = make_engine(device, gpu_expert_memory_bytes=400_000)
    assert run(engine, asked, 1) == alone(device, asked)
    assert engine.stats().overlapped_steps > 5
    assert engine.model_stats()["expert_moves"] > 0


def test_interactive_tokens_come_while_a_batch_step_is_computed(make_engine: Any, monkeypatch: Any) -> None:
    """On CPU tensors, where it is known how many layers a step launches."""
    monkeypatch.setattr(BatchLoss, "borne", Beside.ALL)
    engine, asked = make_engine("cpu"), asked_for(31, 30)
    for name, (prompt, sampling, job_class) in asked.items():
        engine.add(name, prompt, sampling, job_class=job_class)
    between: list[int] = []  # interactive tokens before the batch's first ones, and from there to its next
    seen = 0
    while engine.has_work and len(between) < 3:
        outputs = engine.step()
        seen += sum(len(output.token_ids) for output in outputs if output.request_id == "30")
        if any(output.request_id != "30" for output in outputs):
            between.append(seen)
            seen = 0
    assert min(between[1:]) >= 2  # its prompt was computed with the first


def test_without_a_share_for_interactive_steps_all_are_shared(make_engine: Any) -> None:
    engine = make_engine("cpu", interactive_share=0.0)
    run(engine, asked_for(34, 30), 1)
    assert engine.stats().overlapped_steps == 0


@pytest.mark.parametrize("device", DEVICES)
def test_pages_of_a_running_batch_step_are_given_to_nobody(device: str, make_engine: Any, alone: Any) -> None:
    """There are too few pages for all, so interactive sequences would take those of the batch."""
    asked = asked_for(60, 36, seed=2, tokens=40)
    engine = make_engine(device, num_pages=90)
    assert run(engine, asked, 2) == alone(device, asked)
    assert engine.stats().overlapped_steps > 5 and engine.stats().preemptions > 0


@pytest.mark.parametrize("borne", [Beside.PROMPTS, Beside.ALL], ids=lambda borne: borne.name)
@pytest.mark.parametrize("device", DEVICES)
def test_only_a_step_that_has_begun_is_overtaken(
    device: str, borne: Beside, make_engine: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interactive sequences hold nearly all pages, so none of the batch class can begin. Their own steps then follow
    what was launched before, and stream no experts."""
    asked = asked_for(4, 4, seed=5)
    prompt = [number % VOCABULARY for number in range(440)]
    asked["long"] = prompt, SamplingParams(max_tokens=24, temperature=0.0), JobClass.INTERACTIVE
    expected = alone(device, asked)
    monkeypatch.setattr(BatchLoss, "borne", borne)
    begun = False

    def begin(runner: GraphRunner, batch: Batch) -> PartedStep:
        nonlocal begun
        begun = True
        return begin_step(runner, batch)

    def beside(runner: GraphRunner) -> Any:
        assert begun
        return enter(runner)

    def end_overlap(runner: GraphRunner) -> None:
        nonlocal begun
        begun = False
        end(runner)

    begin_step, enter, end = GraphRunner.begin, GraphRunner.beside, GraphRunner.end_overlap
    monkeypatch.setattr(GraphRunner, "begin", begin)
    monkeypatch.setattr(GraphRunner, "beside", beside)
    monkeypatch.setattr(GraphRunner, "end_overlap", end_overlap)
    engine = make_engine(device, num_pages=30)
    engine.add("long", *asked["long"][:2])
    outputs: list[SequenceOutput] = []
    while not outputs:
        outputs = engine.step()
    for name in list(asked)[:-1]:
        engine.add(name, *asked[name][:2], job_class=JobClass.BATCH)
    for _ in range(5):
        outputs += engine.step()
    assert engine.stats().overlapped_steps == 0
    while engine.has_work:
        outputs += engine.step()
    found = {name: [token for one in outputs if one.request_id == name for token in one.token_ids] for name in asked}
    assert found == expected


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_can_be_aborted_while_its_step_is_computed(device: str, make_engine: Any, alone: Any) -> None:
    asked = asked_for(90, 36, seed=3)
    engine = make_engine(device, num_pages=90)  # so others get the pages at once
    aborts = {step: [str(step % 30), str(40 + step % 9)] for step in range(3, 40, 2)}
    ended = {name for names in aborts.values() for name in names}
    found, expected = run(engine, asked, 2, aborts), alone(device, asked)
    assert all(found[name] == tokens for name, tokens in expected.items() if name not in ended)
    assert any(len(found[name]) < len(expected[name]) for name in ended)
    assert engine.stats().overlapped_steps > 5


# part: the one that fails, the first when a step begins, others later. begun: overlapped steps until then.
@pytest.mark.parametrize(("device", "part", "begun"), few_on_the_cpu((0, 4), (1, 1), (3, 4)))
def test_steps_share_again_once_memory_runs_out(
    device: str, part: int, begun: int, make_engine: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    asked = asked_for(46, 30)
    expected = alone(device, asked)

    def parts(decoder: GpuDecoder, inputs: StepInputs, *, overlapped: bool = False) -> Generator[None, None, Any]:
        nonlocal steps
        steps += overlapped
        launched = launch(decoder, inputs, overlapped=overlapped)
        for _ in range(part if overlapped and steps == begun else 100):
            try:
                next(launched)
            except StopIteration as end:
                return end.value
            yield
        raise torch.OutOfMemoryError

    launch = GpuDecoder.forward_in_parts
    monkeypatch.setattr(GpuDecoder, "forward_in_parts", parts)
    engine = make_engine(device)
    assert run(engine, asked, 1) == expected
    assert engine.stats().out_of_memory == 1 and steps == begun


@pytest.mark.timeout(30)
def test_an_engine_ends_after_a_part_has_failed(small_experts: str, by_decoder: str, monkeypatch: Any) -> None:
    """The error is raised whoever asks for the step, and closing does not wait for the parts that are left."""

    def parts(decoder: GpuDecoder, inputs: StepInputs, *, overlapped: bool = False) -> Generator[None, None, Any]:
        yield
        raise RuntimeError("broken")

    engine = engine_of(small_experts, by_decoder, "cpu")
    monkeypatch.setattr(GpuDecoder, "forward_in_parts", parts)
    for call in (lambda: run(engine, asked_for(31, 30), 1), engine._overlap.finish):
        with pytest.raises(RuntimeError, match="broken"):
            call()
    engine.close()


@pytest.mark.parametrize("device", ["cpu"])  # where a step is not done after its first part
def test_memory_that_runs_out_while_an_abort_waits_is_counted(
    device: str, make_engine: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(step: PartedStep) -> torch.Tensor:
        raise torch.OutOfMemoryError

    asked = asked_for(31, 30)
    engine, expected = make_engine(device), alone(device, asked)
    for name, (prompt, sampling, job_class) in asked.items():
        engine.add(name, prompt, sampling, job_class=job_class)
    while not engine.stats().overlapped_steps:
        engine.step()
    monkeypatch.setattr(PartedStep, "finish", finish)
    engine.abort("0")
    assert engine.stats().out_of_memory == 1
    found: dict[str, list[int]] = {name: [] for name in asked}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    assert found == expected | {"0": []}


@pytest.mark.parametrize("device", DEVICES)
def test_a_long_interactive_prompt_has_a_step_of_its_own(device: str, make_engine: Any, alone: Any) -> None:
    asked = asked_for(34, 30, seed=4)
    prompt = [number % VOCABULARY for number in range(450)]
    asked["long"] = prompt, SamplingParams(max_tokens=8, temperature=0.0), JobClass.INTERACTIVE
    engine = make_engine(device)
    assert run(engine, asked, 1) == alone(device, asked)
