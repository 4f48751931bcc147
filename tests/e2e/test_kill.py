"""kill -9 of each process in turn: streams continue without gaps, and nothing is left behind."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from processes import alive, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

STORY = "Once upon a time there was a king who"
GREEDY = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}  # still running when the process is killed
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 100, "ignore_eos": True}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": GREEDY, "seeded": SEEDED, "two": {**SEEDED, "n": 2, "max_tokens": 60}}
ROOT = Path(__file__).resolve().parents[2]


def kill_at(event: int, pid_of: Callable[[], int | None]) -> Callable[[int], None]:
    """Kills the process when a stream has a number of events."""

    def on_event(count: int) -> None:
        if count == event:
            pid = pid_of()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    return on_event


async def chat(stack: Any, on_event: Callable[[int], None] | None = None) -> tuple[str, str | None]:
    """A streamed chat completion: its text and finish reason."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Tell me of a king."}], "stream": True, **SEEDED}
    text, reason, count = "", None, 0
    async with stack.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return text, reason
            if line.startswith("data: "):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
                count += 1
                if on_event is not None:
                    on_event(count)
    raise AssertionError("the stream ended without [DONE]")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(start_stack: Any) -> AsyncIterator[Any]:
    """One worker, for all tests of this file."""
    async with start_stack() as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(stack: Any) -> dict[str, Any]:
    """The text of each way of sampling when nothing is killed."""
    told: dict[str, Any] = {"chat": await chat(stack)}
    for name, sampling in SAMPLINGS.items():
        job = await stack.submit(prompt=STORY, sampling=sampling)
        told[name] = (await stack.read(job)).choices(sampling.get("n", 1))
    return told


async def test_streams_survive_the_death_of_the_only_worker(stack: Any, undisturbed: Any, record_property: Any) -> None:
    worker = stack.up.workers[0]
    first, deaths = worker.pid, worker.deaths
    jobs = {name: await stack.submit(prompt=STORY, sampling=sampling) for name, sampling in SAMPLINGS.items()}
    stopped = asyncio.Event()

    def stop(count: int) -> None:
        if count == 20:
            worker.signal(signal.SIGSTOP)
            stopped.set()

    async def kill_the_stopped_worker() -> dict[str, int]:
        """The attempts that each job needs: on a busy machine a short one may have ended, or not begun, by now."""
        await stopped.wait()
        records = {name: await stack.job(job) for name, job in jobs.items()}
        worker.signal(signal.SIGKILL)
        attempts = {"queued": 1, "running": 2, "done": 1}
        return {name: attempts[record["state"]] for name, record in records.items()}

    *streams, told, needed = await asyncio.gather(
        stack.read(jobs["greedy"], on_event=stop),
        stack.read(jobs["seeded"]),
        stack.read(jobs["two"]),
        chat(stack),
        kill_the_stopped_worker(),
    )
    assert worker.pid != first
    assert worker.deaths == deaths + 1
    assert needed["greedy"] == 2
    for name, stream in zip(jobs, streams, strict=True):
        assert stream.state == "done"
        assert stream.choices(SAMPLINGS[name].get("n", 1)) == undisturbed[name]
        assert (await stack.job(jobs[name]))["attempts"] == needed[name]
    assert told == undisturbed["chat"]
    record_property("longest_gap_seconds", streams[0].longest_gap)
    assert streams[0].longest_gap < 30.0


@pytest.mark.long
async def test_answers_stay_the_same_where_workers_draft(start_stack: Any, undisturbed: Any) -> None:
    """They continue what a worker had written that died, and give the text of a worker that drafts nothing."""
    async with start_stack(engine={"speculation": "lookup"}) as drafting:
        worker = drafting.up.workers[0]
        jobs = {name: await drafting.submit(prompt=STORY, sampling=sampling) for name, sampling in SAMPLINGS.items()}
        streams = await asyncio.gather(
            drafting.read(jobs["greedy"], on_event=kill_at(20, lambda: worker.pid)),
            drafting.read(jobs["seeded"]),
            drafting.read(jobs["two"]),
        )
        for name, stream in zip(jobs, streams, strict=True):
            assert stream.choices(SAMPLINGS[name].get("n", 1)) == undisturbed[name]
        assert (await drafting.job(jobs["greedy"]))["attempts"] == 2


async def test_a_worker_that_slept_past_its_lease_registers_again(stack: Any, undisturbed: Any) -> None:
    worker = stack.up.workers[0]
    deaths = worker.deaths
    job = await stack.submit(prompt=STORY, sampling=GREEDY)
    stream = await stack.read(job, leave_after=10)
    worker.signal(signal.SIGSTOP)
    await asyncio.sleep(stack.up.config.broker.lease_seconds + 1.0)
    assert (await stack.job(job))["state"] == "queued"
    worker.signal(signal.SIGCONT)
    await stack.read(job, stream)
    assert stream.choices() == undisturbed["greedy"]
    assert worker.deaths == deaths


async def test_streams_survive_the_death_of_redis(stack: Any, undisturbed: Any) -> None:
    worker = stack.up.workers[0]
    deaths = worker.deaths
    job = await stack.submit(prompt=STORY, sampling=SEEDED)
    stream = await stack.read(job, on_event=kill_at(20, lambda: stack.up.redis_pid))
    assert stream.choices() == undisturbed["seeded"]
    assert stream.state == "done"
    assert (await stack.job(job))["attempts"] == 1
    assert worker.deaths == deaths


async def test_a_dead_gateway_is_replaced(stack: Any, undisturbed: Any) -> None:
    job = await stack.submit(prompt=STORY, sampling=SEEDED)
    stream = await stack.read(job, leave_after=10)
    os.kill(stack.up.gateway.pid, signal.SIGKILL)
    await stack.until_ready()
    await stack.read(job, stream)
    assert stream.choices() == undisturbed["seeded"]


async def test_another_worker_continues_the_jobs_of_a_killed_one(
    start_stack: Any, undisturbed: Any, record_property: Any
) -> None:
    # Their supervisor notices the death, so that nobody waits for the lease to expire.
    async with start_stack(workers=2, broker={"lease_seconds": 60.0}) as two:
        job = await two.submit(prompt=STORY, sampling=GREEDY)
        stream = await two.read(job, leave_after=10)
        owner = (await two.job(job))["worker_id"]
        dead = next(worker for worker in two.up.workers if f"-{worker.pid}-" in owner)
        dead.signal(signal.SIGKILL)
        await two.read(job, stream)
        assert (await two.job(job))["worker_id"] != owner
        assert stream.state == "done"
        assert stream.choices() == undisturbed["greedy"]
        record_property("longest_gap_seconds", stream.longest_gap)
        assert stream.longest_gap < 30.0


UP = """
import asyncio
from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig, WorkerConfig
from ktqueue.workers.supervision.supervisor import Supervisor

async def main():
    config = Config(
        broker=BrokerConfig(state_dir={state!r}),
        engine=EngineConfig(num_pages=256, threads=1),
        gateway=GatewayConfig(port=0, drain_seconds=1.0),
        worker=WorkerConfig(drain_seconds=1.0),
    )
    async with Supervisor(config) as up:
        running = asyncio.ensure_future(up.run_until_signal())
        await asyncio.sleep(0)  # its handlers are set
        print(up.url, up.redis_pid, up.gateway.pid, up.workers[0].pid, flush=True)
        await running

asyncio.run(main())
"""


async def start_up(tmp_path: Path) -> tuple[asyncio.subprocess.Process, str, list[int]]:
    """A supervisor in its own process, its URL, and the process ids of its children."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        UP.format(state=str(tmp_path / "state")),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    url, *pids = (await process.stdout.readline()).decode().split()
    assert len(pids) == 3
    return process, url, [int(pid) for pid in pids]


async def none_left(pids: list[int]) -> None:
    await until(lambda: not any(alive(pid) for pid in pids), 10)


@pytest.mark.long
async def test_a_killed_supervisor_leaves_no_processes(tmp_path: Path) -> None:
    process, _, pids = await start_up(tmp_path)
    assert all(alive(pid) for pid in pids)
    process.kill()
    await process.wait()
    await none_left(pids)


@pytest.mark.long
async def test_a_signal_stops_everything_in_order(tmp_path: Path) -> None:
    process, _, pids = await start_up(tmp_path)
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(20):
        assert await process.wait() == 0
    assert not any(alive(pid) for pid in pids)
