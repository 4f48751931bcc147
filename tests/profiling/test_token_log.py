"""Lines of tokens: those that one step gave a choice count its time once."""

import time
from pathlib import Path

import pytest

from ktqueue.core.settings.profile import ProfileConfig
from ktqueue.profiling.folder import read_profile
from ktqueue.profiling.records import StepMoments, StepRecord, Totals
from ktqueue.profiling.request_times import request_times
from ktqueue.profiling.token_log import TokenLog
from ktqueue.profiling.writer import RecordWriter


def step(number: int, began: float) -> StepRecord:
    """A step of 70 ms, 10 ms for each part, of which none waits."""
    moments = StepMoments._make([*(began + 0.01 * place for place in range(8)), 0.0])
    totals = Totals(0, 0, 0, None)
    return StepRecord(number, moments, 1, 1, 1, 8, 8, totals, totals)


def test_tokens_of_one_step_count_its_time_once(tmp_path: Path) -> None:
    writer = RecordWriter(ProfileConfig(folder=str(tmp_path)), {})
    log, now = TokenLog(writer), time.monotonic()
    log.claimed("job", now, waited=0.5, positions=[0])
    for note in (log.tokenising, log.tokenised, log.added):
        note("job", now)
    steps = [step(1, now), step(2, now + 0.1), step(3, now + 0.2)]
    writer.put_step(steps[0])
    for given, tokens in zip(steps, ([1], [1, 1, 2], [1, 1]), strict=True):  # two right drafts, of which one forces
        for count in tokens:
            log.token(given, "job", 0, count, given.moments.ended)
        log.publish("job")
        log.published()(given.moments.ended)
    writer.close()
    processes = read_profile(tmp_path)
    assert [line["position"] for process in processes for line in process.tokens] == list(range(7))
    (times,) = request_times(processes)
    assert times.tokens == 7
    assert times.parts["launch"] == pytest.approx(0.03, abs=1e-6)
    assert times.parts["between"] == pytest.approx(2 * 0.03, abs=1e-6)
    assert times.seconds == pytest.approx(times.ended - times.began, abs=1e-5)
