"""A job that kills its worker each time fails as a poison job. Jobs beside it are completed."""

import asyncio
import sys
from typing import Any

import pytest

# The fork server, except that one seed ends the process in its first step, as a faulty kernel would.
DEADLY_SEED = 666
FORK_SERVER = f"""
import os, signal
from ktqueue.engine.engine import Engine
from ktqueue.workers.supervision.fork_server import main

add, step, deadly = Engine.add, Engine.step, []

def note(engine, request_id, ids, sampling, **rest):
    add(engine, request_id, ids, sampling, **rest)
    if sampling.seed == {DEADLY_SEED}:
        deadly.append(request_id)

def die(engine, *given, **named):
    if deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(engine, *given, **named)

Engine.add, Engine.step = note, die
main()
"""


@pytest.mark.long
@pytest.mark.timeout(200)
async def test_a_job_that_kills_its_workers_fails_alone(start_stack: Any) -> None:
    command = [sys.executable, "-c", FORK_SERVER]
    greedy = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    async with start_stack(workers=2, engine={"max_num_seqs": 8}, fork_server_command=command) as stack:
        calm = await stack.read(await stack.submit(prompt="Once upon a time", sampling=greedy))
        # Submitted together, so that workers claim them together with the poison job.
        bodies = [{"prompt": "Once upon a time", "sampling": greedy} for _ in range(10)]
        bodies.insert(3, {"prompt": "Once", "sampling": {**greedy, "seed": DEADLY_SEED}})
        jobs = await asyncio.gather(*(stack.submit(**body) for body in bodies))
        streams = await asyncio.gather(*(stack.read(job) for job in jobs))
        poison, stream = jobs.pop(3), streams.pop(3)
        assert [(await stack.job(job))["state"] for job in jobs] == ["done"] * len(jobs)
        assert [stream.choices() for stream in streams] == [calm.choices()] * len(jobs)
        record = await stack.job(poison)
        assert (record["state"], record["error"]["code"]) == ("failed", "poison_job")
        assert record["attempts"] == stack.up.config.broker.max_attempts
        assert stream.state == "failed"
        assert sum(worker.deaths for worker in stack.up.workers) == record["attempts"]
        after = await stack.read(await stack.submit(prompt="Once upon a time", sampling=greedy))
        assert after.choices() == calm.choices()
