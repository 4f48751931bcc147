"""Records of an engine's steps, in the files of a profile."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ktqueue.core.expert_work import ExpertWork
from ktqueue.core.request import SamplingParams
from ktqueue.core.settings.profile import ProfileConfig
from ktqueue.engine.engine import Engine
from ktqueue.profiling.folder import read_profile
from ktqueue.profiling.records import STEP_PARTS
from ktqueue.profiling.writer import RecordWriter

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
ALWAYS = 1e-9  # seconds between two records of routing


class CountingModel:
    """Calls a model, and counts as if each step used expert 1 of its only layer twice, and read 100 kB in 1 ms."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._steps = 0

    def __call__(self, **step: Any) -> Any:
        self._steps += 1
        return self._model(**step)

    def expert_work(self) -> ExpertWork:
        return ExpertWork(self._steps, 2 * self._steps, 100_000 * self._steps, 0.001 * self._steps)

    def expert_uses(self) -> list[list[int]]:
        return [[0, (2 * self._steps) % 2**32]]


def test_a_profile_has_a_line_for_each_step(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, tmp_path: Path
) -> None:
    engine = make_engine(model, vocabulary)
    engine.add("before", PROMPT[::-1], SamplingParams(max_tokens=2))
    run(engine)
    engine.reset_statistics()
    writer = RecordWriter(ProfileConfig(folder=str(tmp_path)), {"role": "test"})
    engine.start_profile(writer, ALWAYS)
    engine.add("x", PROMPT, SamplingParams(max_tokens=4))
    run(engine)
    stats = engine.stats()
    engine.close()
    writer.close()
    (process,) = read_profile(tmp_path)
    lines = process.steps
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["tokens"] for line in lines] == [9, 1, 1, 1]
    assert [line["prompt_tokens"] for line in lines] == [9, 0, 0, 0]
    assert [line["sampled"] for line in lines] == [1, 1, 1, 1]
    assert {line["pages_used"] + line["pages_free"] for line in lines} == {stats.total_pages}
    for line in lines:
        assert sum(line[part] for part in STEP_PARTS) == pytest.approx(line["seconds"], abs=1e-6)
        assert "cpu_bytes" not in line  # this model counts nothing
    assert sum(line["launch"] + line["wait"] for line in lines) == pytest.approx(stats.forward_seconds, abs=1e-6)
    assert all(earlier["at"] < later["at"] for earlier, later in pairwise(lines))
    assert process.routing == []


def test_work_of_experts_is_that_of_each_step(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, tmp_path: Path
) -> None:
    engine = make_engine(CountingModel(model), vocabulary)
    engine.add("before", PROMPT[::-1], SamplingParams(max_tokens=2))
    run(engine)
    writer = RecordWriter(ProfileConfig(folder=str(tmp_path)), {})
    engine.start_profile(writer, ALWAYS)
    engine.add("x", PROMPT, SamplingParams(max_tokens=4))
    run(engine)
    writer.close()
    (process,) = read_profile(tmp_path)
    assert [(line["cpu_runs"], line["cpu_experts"], line["cpu_bytes"]) for line in process.steps] == [
        (1, 2, 100_000)
    ] * 4
    assert [line["cpu_gb_per_second"] for line in process.steps] == pytest.approx([0.1] * 4)
    assert [(line["steps"], line["uses"]) for line in process.routing] == [(1, [[0, 2]])] * 3  # the first only begins


class PlacingModel(CountingModel):
    """Has some experts in GPU memory, whose counts are of single steps if they are asked for."""

    depends_on_uses = True
    counts_each_step = False

    def expert_work(self) -> ExpertWork:
        counted = self._steps if self.counts_each_step else 0
        return super().expert_work()._replace(uses=9 * counted, gpu_uses=6 * counted, gpu_experts=5 * counted)

    def count_each_step(self) -> None:
        self.counts_each_step = True

    def place_experts(self, uses: Any) -> None:
        raise NotImplementedError


def test_experts_in_gpu_memory_are_counted_in_each_step(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, tmp_path: Path
) -> None:
    engine = make_engine(PlacingModel(model), vocabulary)
    writer = RecordWriter(ProfileConfig(folder=str(tmp_path)), {})
    engine.start_profile(writer, ALWAYS)
    engine.add("x", PROMPT, SamplingParams(max_tokens=4))
    run(engine)
    writer.close()
    (process,) = read_profile(tmp_path)
    assert [(line["uses"], line["gpu_uses"], line["gpu_experts"]) for line in process.steps] == [(9, 6, 5)] * 4
    assert {line["fetched_bytes"] for line in process.steps} == {0}


def test_parts_of_steps_have_named_ranges_if_asked_for(
    model: Any, vocabulary: Any, make_engine: Callable[..., Engine], run: Any, tmp_path: Path
) -> None:
    names: list[str] = []

    def named_range(name: str) -> AbstractContextManager[None]:
        names.append(name)
        return nullcontext()

    engine = make_engine(model, vocabulary)
    writer = RecordWriter(ProfileConfig(folder=str(tmp_path)), {})
    engine.start_profile(writer, ALWAYS, named_range)
    engine.add("x", PROMPT, SamplingParams(max_tokens=2))
    run(engine)
    writer.close()
    assert names == ["schedule", "build", "launch", "sample"] * 2
