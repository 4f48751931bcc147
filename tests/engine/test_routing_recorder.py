"""Routing of generated tokens: the same whatever runs beside them, on the operators of a CPU and of a GPU."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoder_families import make_model
from device_engine import on_device
from endless_vocabulary import NoEnd

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine import routing_recorder
from ktqueue.engine.engine import Engine
from ktqueue.engine.routing_recorder import RoutingRecorder
from ktqueue.engine.sequence import SequenceStatus
from ktqueue.loading.load import LoadedModel, load_model

CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=24, page_size=4, dtype="float32", num_pages=300)
LAYERS, CHOSEN, SEGMENT = 3, 4, 8
PROMPTS = {name: [(7 * place + 3 * len(name)) % 90 for place in range(5 * len(name))] for name in ("a", "bb", "cccc")}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_recorder, "SEGMENT", SEGMENT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with experts."""
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3_moe", num_hidden_layers=LAYERS, num_experts=16, num_experts_per_tok=CHOSEN).save_pretrained(path)
    return str(path)


@pytest.fixture(params=["host", "device", "device with experts"])
def made(request: pytest.FixtureRequest, folder: str, by_decoder: str) -> tuple[Engine, LoadedModel]:
    """An engine that records. "device": the operators of a GPU, on tensors of the CPU."""
    model = load_model(folder, rules=None if request.param == "host" else by_decoder)
    module: Any = model.module
    module.record_choices(CONFIG.step_tokens)
    if request.param == "host":
        engine = Engine(module, NoEnd(model.card_facts.vocab_size), model.kv_layout(4), CONFIG, 300, 250)
    else:
        memory = 400 << 10 if request.param == "device with experts" else 0
        config = replace(CONFIG, gpu_expert_memory_bytes=memory, expert_streaming="on" if memory else "off")
        engine = on_device(model, config)
        assert module.depends_on_uses == (memory > 0)
    engine.routing = RoutingRecorder(module)
    return engine, model


def segments_of(engine: Engine, *names: str, tokens: int = 2 * SEGMENT + 3) -> list[np.ndarray[Any, Any]]:
    """Recorded while these sequences run; a further one begins in each step."""
    recorder = engine.routing
    assert recorder is not None
    recorder.segments = []
    waiting = list(names)
    while waiting or engine.has_work:
        if waiting:
            name = waiting.pop()
            engine.add(name, PROMPTS[name], SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        engine.step(lambda: True)
    return recorder.segments


def test_a_sequence_has_its_routing_whatever_runs_beside_it(made: tuple[Engine, LoadedModel]) -> None:
    engine, _ = made
    alone = {name: segments_of(engine, name) for name in PROMPTS}
    assert {len(found) for found in alone.values()} == {2}  # and an incomplete one, which is left out
    assert {segment.shape for found in alone.values() for segment in found} == {(SEGMENT, LAYERS, CHOSEN)}
    together = segments_of(engine, *PROMPTS)
    found = {segment.tobytes() for segment in together}
    assert len(found) == len(together) == 6
    assert found == {segment.tobytes() for segments in alone.values() for segment in segments}


def test_each_use_is_recorded_once(made: tuple[Engine, LoadedModel]) -> None:
    engine, model = made
    module: Any = model.module
    if getattr(module, "depends_on_uses", False):
        return  # its counts are some steps old
    before = np.array(module.expert_uses())
    PROMPTS["one"] = [5]  # so that all tokens are scored; the last one that is generated is not computed
    (segment,) = segments_of(engine, "one", tokens=SEGMENT)
    uses = np.array(module.expert_uses()) - before
    for layer in range(LAYERS):
        assert (uses[layer] == np.bincount(segment[:, layer].reshape(-1), minlength=uses.shape[1])).all()
    del PROMPTS["one"]


def test_the_number_of_segments_is_bounded(made: tuple[Engine, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_recorder, "MOST_SEGMENTS", 3)
    engine, _ = made
    assert len(segments_of(engine, *PROMPTS, tokens=3 * SEGMENT)) == 3
    assert len(segments_of(engine, "a")) == 2


class Progress:
    """What the recorder reads of a sequence."""

    status = SequenceStatus.RUNNING
    num_computed_tokens = 0


class OneExpert:
    """A model of one layer whose token at place t of a step chose expert t."""

    def record_choices(self, tokens: int) -> None:
        pass

    def choices(self, scored: Any, tokens: int) -> Any:
        return scored.astype(np.uint16).reshape(-1, 1, 1)


def test_a_segment_has_no_gaps() -> None:
    """Tokens that a grammar forces are computed without a draw, so a sequence may jump."""
    recorder = RoutingRecorder(OneExpert())
    batch: Any = SimpleNamespace(scored=torch.tensor([3, 5]), input_ids=torch.zeros(1, 6), next_rows=None)

    sequence: Any = Progress()
    for computed in (*range(1, SEGMENT), *range(SEGMENT + 5, 2 * SEGMENT + 4)):
        sequence.num_computed_tokens = computed
        recorder.add(batch, [(1, sequence, 0), (0, sequence, 1)])
    assert recorder.segments == []
    sequence.num_computed_tokens += 1
    recorder.add(batch, [(1, sequence, 0)])
    assert [segment.tolist() for segment in recorder.segments] == [[[[5]]] * SEGMENT]
