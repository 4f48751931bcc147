"""Many jobs of every kind over HTTP, with cancels and readers that leave: each ends once, and nothing is left over."""

import asyncio
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx
import pytest
import redis
from processes import until

from ktqueue.broker.broker import Broker

WORDS = ("king", "queen", "wolf", "forest", "bread", "gold", "river", "night", "door", "mother", "giant", "hill", "fox")
CLIENTS = 48
TERMINAL = {"done", "failed", "cancelled", "expired"}
SHORT = {"job_ttl": 20.0, "journal_ttl": 20.0, "idempotency_ttl": 20.0, "model_ttl": 5.0}


class Crowd:
    """Clients whose actions are drawn from a seed."""

    def __init__(self, stack: Any, seed: int) -> None:
        self.stack = stack
        self.random = random.Random(seed)
        self.ends: dict[str, str] = {}  # job id to the state of its record when its client finished
        self.habits: Counter[str] = Counter()
        self.tokens = 0

    def body(self) -> dict[str, Any]:
        draw = self.random
        sampling = {
            "max_tokens": draw.randint(1, 12),
            "n": draw.choice([1, 1, 1, 1, 1, 2, 3]),
            "temperature": draw.choice([0.0, 0.8]),
            "seed": draw.randrange(1 << 30),
            "ignore_eos": draw.random() < 0.5,
        }
        prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 60)))
        return {"prompt": prompt, "sampling": sampling, "job_class": draw.choice(["interactive", "batch"])}

    async def client(self, count: int) -> None:
        for _ in range(count):
            habit = self.random.choices(
                ["reads", "cancels", "comes and goes", "never reads", "chat that hangs up", "late", "too long"],
                [40, 15, 15, 10, 10, 5, 5],
            )[0]
            self.habits[habit] += 1
            await getattr(self, habit.replace(" ", "_"))(self.body())

    async def reads(self, body: dict[str, Any]) -> None:
        job = await self.stack.submit(**body)
        stream = await self.whole(job, body)
        assert stream.state == "done"

    async def whole(self, job: str, body: dict[str, Any]) -> Any:
        """Read to the end, over any number of connections."""
        stream = await self.stack.read(job)
        while not stream.ended:  # the gateway closed the connection
            await asyncio.sleep(0.1)
            with suppress(httpx.TransportError):
                await self.stack.read(job, stream)
        self.check(stream, body)
        await self.settled(job)
        assert stream.state == self.ends[job]
        return stream

    def check(self, stream: Any, body: dict[str, Any]) -> None:
        sampling = body["sampling"]
        choices = stream.choices(sampling["n"])
        self.tokens += sum(len(ids) for ids, _ in choices)
        assert all(len(ids) <= sampling["max_tokens"] for ids, _ in choices)
        if stream.state == "done":
            finished = sorted(event["index"] for event in stream.events if "finish_reason" in event)
            assert finished == list(range(sampling["n"]))
            assert stream.events[-1]["usage"]["completion_tokens"] == sum(len(ids) for ids, _ in choices)
            if sampling["ignore_eos"]:
                assert all(len(ids) == sampling["max_tokens"] for ids, _ in choices)

    async def cancels(self, body: dict[str, Any]) -> None:
        job = await self.stack.submit(**body)
        await asyncio.sleep(self.random.random() * 0.3)
        answer = await self.stack.http.delete(f"/v1/jobs/{job}")
        assert answer.status_code in (200, 409)
        stream = await self.whole(job, body)
        assert stream.state in ({"cancelled", "done"} if answer.status_code == 200 else {"done"})

    async def comes_and_goes(self, body: dict[str, Any]) -> None:
        job = await self.stack.submit(**body)
        stream = await self.stack.read(job, leave_after=self.random.randint(1, 3))
        while not stream.ended:
            await asyncio.sleep(self.random.random() * 0.05)
            await self.stack.read(job, stream, leave_after=self.random.randint(1, 5))
        self.check(stream, body)
        await self.settled(job)

    async def never_reads(self, body: dict[str, Any]) -> None:
        assert await self.unread(await self.stack.submit(**body)) == "done"

    async def chat_that_hangs_up(self, body: dict[str, Any]) -> None:
        ask = {
            "model": "demo",
            "messages": [{"role": "user", "content": body["prompt"]}],
            "max_tokens": 200,
            "stream": True,
        }
        async with self.stack.http.stream("POST", "/v1/chat/completions", json=ask) as answer:
            assert answer.status_code == 200
            job = answer.headers["x-job-id"]
            lines = 0
            async for _ in answer.aiter_lines():
                lines += 1
                if lines > 2:
                    break
        assert await self.unread(job) in ("cancelled", "done")

    async def late(self, body: dict[str, Any]) -> None:
        body["sampling"] |= {"max_tokens": 400, "ignore_eos": True}  # no engine makes that many in a millisecond
        job = await self.stack.submit(**body, expires_in=0.001)
        assert await self.unread(job) == "expired"

    async def too_long(self, body: dict[str, Any]) -> None:
        job = await self.stack.submit(**{**body, "prompt": "king " * 9000})
        assert await self.unread(job) == "failed"

    async def unread(self, job: str) -> str:
        """Wait for the job's end, then look at its journal for the first time."""
        await self.settled(job)
        stream = await self.stack.read(job)
        stream.choices(3)
        assert stream.state == self.ends[job]
        return self.ends[job]

    async def settled(self, job: str) -> None:
        """Wait for the job's end without reading its journal, and note it."""
        async with asyncio.timeout(60):
            while True:
                record = await self.stack.job(job)
                if record["state"] in TERMINAL:
                    break
                await asyncio.sleep(0.1)
        assert job not in self.ends
        self.ends[job] = record["state"]


async def run(start_stack: Any, redis_url: str, *, jobs: int, workers: int, kills: bool) -> Crowd:
    broker = {"url": redis_url, **SHORT, **({"max_attempts": 100} if kills else {})}  # no kill is a job's fault
    async with start_stack(workers=workers, broker=broker, engine={"max_num_seqs": 32}) as stack:
        free = await free_pages(stack)
        crowd = Crowd(stack, seed=2)
        began = time.monotonic()
        killer = asyncio.create_task(kill(stack, random.Random(3))) if kills else None
        await asyncio.gather(*(crowd.client(jobs // CLIENTS + (i < jobs % CLIENTS)) for i in range(CLIENTS)))
        if killer is not None:
            killer.cancel()
        seconds = time.monotonic() - began
        deaths = [worker.deaths for worker in stack.up.workers]
        print(f"{jobs} jobs, {crowd.tokens} tokens in {seconds:.1f} s; {dict(crowd.habits)}; deaths {deaths}")  # noqa: T201
        assert len(crowd.ends) == jobs
        await until(lambda: all_free(stack, free), 60.0 if kills else 10.0)
        assert any(deaths) == kills
        for job in list(crowd.ends)[-20:]:  # a terminal state never changes
            assert (await stack.job(job))["state"] == crowd.ends[job]
    with redis.Redis.from_url(redis_url) as client:
        check_that_everything_expires(client, within=40.0)
    return crowd


async def kill(stack: Any, draw: random.Random) -> None:
    """Every few seconds, kill a busy worker or let one sleep past its lease."""
    async with await Broker.open(stack.up.config.broker) as broker:
        while True:
            await asyncio.sleep(draw.uniform(4.0, 8.0))
            at_work = {one.pid for one in await broker.models.workers()}
            workers = [worker for worker in stack.up.workers if worker.pid in at_work]
            if not workers:
                continue
            worker = draw.choice(workers)
            if draw.random() < 0.7:
                worker.signal(signal.SIGKILL)
            else:
                worker.signal(signal.SIGSTOP)
                await asyncio.sleep(3.0)
                worker.signal(signal.SIGCONT)


async def worker_stats(stack: Any) -> list[dict[str, float]]:
    text = (await stack.http.get("/metrics")).text
    free = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("ktqueue:kv_cache_free_pages")]
    total = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("ktqueue:kv_cache_total_pages")]
    return [{"free": a, "total": b} for a, b in zip(free, total, strict=True)]


async def free_pages(stack: Any) -> float:
    stats = await worker_stats(stack)
    assert stats
    assert all(one["free"] == one["total"] > 0 for one in stats)
    return stats[0]["free"]


async def all_free(stack: Any, free: float) -> bool:
    stats = await worker_stats(stack)
    return len(stats) == len(stack.up.workers) and all(one["free"] == free for one in stats)


def check_that_everything_expires(client: Any, within: float) -> None:
    """Every key has a time to live, and none a longer one than `within` seconds."""
    left = {key.decode().rpartition(":")[2]: client.pttl(key) for key in client.scan_iter()}
    assert left.pop("tick", 0) != -1
    assert all(0 <= ttl <= within * 1000 for ttl in left.values() if ttl != -2), left  # -2: it has expired meanwhile


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_hundreds_of_jobs_end_once_each(start_stack: Any, redis_url: str) -> None:
    crowd = await run(start_stack, redis_url, jobs=200, workers=1, kills=False)
    assert len(crowd.habits) == 7
    assert set(crowd.ends.values()) == TERMINAL


@pytest.mark.soak
@pytest.mark.timeout(1_800)
async def test_thousands_of_jobs_end_once_each_while_workers_die(start_stack: Any, redis_url: str) -> None:
    await run(start_stack, redis_url, jobs=4_000, workers=2, kills=True)
