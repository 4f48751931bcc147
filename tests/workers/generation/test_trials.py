"""Jobs on their last try: the worker begins with them one by one, so that a death is that one's fault."""

from typing import Any

import pytest
import redis

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, SamplingParams


async def test_suspects_begin_one_after_the_other(
    broker: Broker, start_worker: Any, finished: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = GenerationRequest(model="demo", prompt="Once", sampling=SamplingParams(max_tokens=8, ignore_eos=True))
    jobs = [(await broker.jobs.submit(request)).id for _ in range(3)]
    for _ in range(broker.config.max_attempts - 1):  # workers that took them all and told nothing
        lease = await Lease.register(broker, model.card())
        assert len(await lease.claim(8)) == len(jobs)
        await broker.reaper().release_lease(lease.id)
        await lease.close()
    new = (await broker.jobs.submit(request)).id
    began: list[tuple[str, set[str | None], list[int]]] = []
    engine, tag = model.engine(), broker.keys.tag
    add = engine.add
    with redis.Redis.from_url(broker.config.url or "", decode_responses=True) as client:

        def note(job_id: str, *given: Any, **named: Any) -> None:
            trials = {client.hget(worker, "trial") for worker in client.scan_iter(f"{tag}:worker:*")}
            began.append((job_id, trials - {None}, [client.xlen(f"{tag}:journal:{job}") for job in jobs]))
            add(job_id, *given, **named)

        monkeypatch.setattr(engine, "add", note)
        async with start_worker(engine):
            for job in [*jobs, new]:
                assert (await finished(job)).state is JobState.DONE
    suspects = [one for one in began if one[0] != new]
    assert [(job, trials) for job, trials, _ in suspects] == [(job, {job}) for job in jobs]
    for place, (_, _, told) in enumerate(suspects):
        assert all(told[:place])  # each that came before has shown a token
        assert not any(told[place:])
