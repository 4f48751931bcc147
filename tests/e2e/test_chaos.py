"""A short kill loop with a fixed seed: no kill loses a job or changes the text that a reader sees."""

import logging

import pytest

from tests.chaos.loop import Plan, chaos
from tests.chaos.nemesis import GATEWAY_KILL, REDIS_KILL, UNSEEN_KILL, WORKER_DRAIN, WORKER_KILL, WORKER_STOP

PACE = {WORKER_KILL: 3.0, UNSEEN_KILL: 3.0, WORKER_STOP: 5.0, WORKER_DRAIN: 4.0, REDIS_KILL: 10.5, GATEWAY_KILL: 6.0}
SHORT = Plan(
    seconds=14.0, seed=11, workers=2, clients=8, rows=8, requests=10, longest=120, lease_seconds=1.0, until_empty=False,
    pace=tuple(PACE.items()),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_short_kill_loop_breaks_no_promise(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        result = await chaos(SHORT)
    print(result)  # noqa: T201
    assert not any(result["faults"].values()), (result["faults"], caplog.messages)
    assert result["attacks"].keys() == PACE.keys()
    assert result["worker_deaths"] >= result["attacks"][WORKER_KILL] + result["attacks"][UNSEEN_KILL] > 2
    assert result["jobs_hit"] > 0
    assert result["jobs"] > SHORT.clients
    assert result["ends"].keys() == {"done", "cancelled"}
