"""The kill loop, short and from a seed: whatever is killed, no job is lost and no reader sees another tale."""

import logging

import pytest

from benchmarks.chaos import Plan, chaos
from benchmarks.chaos_nemesis import GATEWAY_KILL, REDIS_KILL, UNSEEN_KILL, WORKER_DRAIN, WORKER_KILL, WORKER_STOP

PACE = {WORKER_KILL: 3.0, UNSEEN_KILL: 3.0, WORKER_STOP: 5.0, WORKER_DRAIN: 4.0, REDIS_KILL: 10.5, GATEWAY_KILL: 6.0}
SHORT = Plan(
    seconds=14.0, seed=11, workers=2, clients=8, rows=8, tales=10, longest=120, lease_seconds=1.0, until_empty=False,
    pace=tuple(PACE.items()),
)  # fmt: skip


@pytest.mark.timeout(300)
async def test_a_short_kill_loop_breaks_no_promise(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        told = await chaos(SHORT)
    print(told)  # noqa: T201
    assert not any(told["faults"].values()), (told["faults"], caplog.messages)
    assert told["blows"].keys() == PACE.keys()
    assert told["worker_deaths"] >= told["blows"][WORKER_KILL] + told["blows"][UNSEEN_KILL] > 2
    assert told["jobs_hit"] > 0
    assert told["jobs"] > SHORT.clients
    assert told["ends"].keys() == {"done", "cancelled"}
