"""The clock of a worker's host: no deadline depends on it, because Redis counts the time that is left."""

import asyncio
import time
from typing import Any

import pytest

from ktqueue.broker.broker import Broker
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, SamplingParams


async def test_a_worker_whose_clock_is_ahead_expires_no_job(
    broker: Broker, start_worker: Any, finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    request = GenerationRequest(model="demo", prompt="One", sampling=sampling, expires_in=600.0)
    async with start_worker() as running:  # the first job is handed over, the others are claimed
        for job in await asyncio.gather(*(broker.jobs.submit(request) for _ in range(3))):
            assert (await finished(job.id)).state is JobState.DONE
        await running.drained()
