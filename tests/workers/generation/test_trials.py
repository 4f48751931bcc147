"""A worker starts jobs on their last attempt one at a time, so that its death is charged to the right job."""

from typing import Any

import redis

from ktqueue.broker.broker import Broker
from ktqueue.broker.lease import Lease
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.engine.engine import Engine


async def test_suspect_jobs_begin_one_after_the_other(
    broker: Broker, start_worker: Any, finished: Any, model: Any
) -> None:
    request = GenerationRequest(model="demo", prompt="Once", sampling=SamplingParams(max_tokens=8, ignore_eos=True))
    jobs = [(await broker.jobs.submit(request)).id for _ in range(3)]
    for _ in range(broker.config.max_attempts - 1):  # workers that claimed all jobs and died without a token
        lease = await Lease.register(broker, model.card())
        assert len(await lease.claim(8)) == len(jobs)
        await broker.reaper().release_lease(lease.id)
        await lease.close()
    new = (await broker.jobs.submit(request)).id
    began: list[tuple[str, set[str | None], list[int]]] = []
    tag = broker.keys.tag
    with redis.Redis.from_url(broker.config.url or "", decode_responses=True) as client:

        class RecordingEngine(Engine):
            def add(self, request_id: str, *arguments: Any, **options: Any) -> None:
                trials = {client.hget(worker, "trial") for worker in client.scan_iter(f"{tag}:worker:*")}
                began.append((request_id, trials - {None}, [client.xlen(f"{tag}:journal:{job}") for job in jobs]))
                super().add(request_id, *arguments, **options)

        async with start_worker(model.engine(kind=RecordingEngine)):
            for job in [*jobs, new]:
                assert (await finished(job)).state is JobState.DONE
    suspects = [entry for entry in began if entry[0] != new]
    assert [(job, trials) for job, trials, _ in suspects] == [(job, {job}) for job in jobs]
    for place, (_, _, journal_lengths) in enumerate(suspects):
        assert all(journal_lengths[:place])  # each earlier suspect has a token
        assert not any(journal_lengths[place:])
