"""Measures how interactive jobs fare beside a deep batch queue: `python -m benchmarks.queue.fairness`.

One real worker runs the built-in model over a private Redis, as under `ktqueue up`. Interactive jobs arrive at random
moments (exponential gaps, fixed seed), first at an idle worker, then while thousands of batch jobs wait. wait: from the
call that submits a job to its first token at a reader of its journal. batch kept: its tokens a second beside
interactive jobs, relative to alone. share in a flood: batch's part of all tokens while there are always more
interactive jobs than rows. The command prints a table and writes results/fairness.json.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.engine.compare import PROMPTS
from benchmarks.percentiles import percentile, percentiles
from benchmarks.queue.page import FAIRNESS
from benchmarks.queue.servers import whole_system
from benchmarks.results import write
from benchmarks.tables import numbered, table
from ktqueue.broker.broker import Broker
from ktqueue.core.config import EngineConfig
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams

INTERACTIVE_TOKENS = 32
BATCH_TOKENS = 128
SUBMITTERS = 16
SETTLE_SECONDS = 2.0


def request(model: str, number: int, job_class: JobClass) -> GenerationRequest:
    """A different prompt for each number."""
    tokens = BATCH_TOKENS if job_class is JobClass.BATCH else INTERACTIVE_TOKENS
    return GenerationRequest(
        model=model,
        prompt=f"{job_class} tale {number}. {PROMPTS[number % len(PROMPTS)]}",
        sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        job_class=job_class,
    )


async def interactive(broker: Broker, model: str, *, rate: float, count: int, seed: int) -> list[float]:
    """Seconds that each of `count` interactive jobs waited for its first token; `rate` of them come in a second."""
    noise = random.Random(seed)

    requests = [request(model, seed * count + number, JobClass.INTERACTIVE) for number in range(count)]
    return await first_token_waits(broker, requests, lambda: noise.expovariate(rate))


async def first_token_waits(
    broker: Broker, requests: Sequence[GenerationRequest], pause: Callable[[], float], **options: Any
) -> list[float]:
    """Submit the requests, with a `pause` in seconds after each. Returns the seconds to each first token."""

    async def wait(request: GenerationRequest) -> float:
        began = time.perf_counter()
        job = await broker.jobs.submit(request, **options)
        waited = None
        async for event in broker.journal.follow(job.id):
            if waited is None and event.token_ids:
                waited = time.perf_counter() - began
        assert waited is not None, f"{job.id} ended without a token"
        return waited

    async with asyncio.TaskGroup() as group:
        tasks = []
        for each in requests:
            tasks.append(group.create_task(wait(each)))
            await asyncio.sleep(pause())
    return [task.result() for task in tasks]


async def cancel_all(broker: Broker, jobs: Sequence[str]) -> None:
    """Cancel the jobs, and wait until none waits or runs."""
    for start in range(0, len(jobs), SUBMITTERS):
        await asyncio.gather(*(broker.jobs.cancel(job) for job in jobs[start : start + SUBMITTERS]))
    while True:
        await asyncio.sleep(SETTLE_SECONDS)
        (depth,) = await broker.jobs.depth()
        if depth.running + depth.interactive + depth.batch == 0:
            return


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--rounds`, and `--rows` and `--threads` of the worker."""
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="rows of the worker's engine")
    parser.add_argument("--threads", type=int, default=1, help="of the worker; leave a core to the rest")


async def fill(broker: Broker, model: str, count: int) -> list[str]:
    """Queue `count` batch jobs and return their ids."""
    numbers = iter(range(count))

    async def submit() -> list[str]:
        return [(await broker.jobs.submit(request(model, number, JobClass.BATCH))).id for number in numbers]

    return [job for jobs in await asyncio.gather(*(submit() for _ in range(SUBMITTERS))) for job in jobs]


async def batch_alone(broker: Broker, seconds: float) -> float:
    """Tokens a second of batch jobs, over whole beats of the worker."""
    first, began = await next_figure(broker)
    await asyncio.sleep(seconds)
    last, ended = await next_figure(broker)
    return (last - first) / (ended - began)


async def next_figure(broker: Broker) -> tuple[float, float]:
    """The number of generated tokens when it next changes, and the time of the change."""
    (before,) = await broker.models.workers()
    while True:
        await asyncio.sleep(0.002)
        (now,) = await broker.models.workers()
        if (tokens := now.stats["generation_tokens"]) != before.stats["generation_tokens"]:
            return tokens, time.perf_counter()


async def flood(broker: Broker, model: str, clients: int, seconds: float) -> float:
    """Batch's part of all tokens while each of so many clients submits one interactive job after another."""
    tokens = 0

    async def client(number: int) -> None:
        nonlocal tokens
        while True:
            job = await broker.jobs.submit(request(model, number, JobClass.INTERACTIVE))
            async for event in broker.journal.follow(job.id):
                tokens += len(event.token_ids)
            number += clients

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        first, _ = await next_figure(broker)
        before = tokens
        await asyncio.sleep(seconds)
        last, _ = await next_figure(broker)
        return 1 - (tokens - before) / (last - first)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def waits(values: list[float]) -> dict[str, float]:
    """A summary of waits in seconds, in milliseconds."""
    milliseconds = [1e3 * value for value in values]
    mean = statistics.mean(milliseconds)
    return {"jobs": len(values), "mean_ms": mean, **percentiles(milliseconds, 50, 95), "max_ms": max(milliseconds)}


async def round_of(broker: Broker, model: str, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One round: interactive jobs alone, batch jobs alone, then both."""
    alone = await interactive(broker, model, rate=arguments.rate, count=arguments.jobs, seed=seed)
    began = time.perf_counter()
    jobs = await fill(broker, model, arguments.batch)
    submitted = len(jobs) / (time.perf_counter() - began)
    batch_rate = await batch_alone(broker, arguments.seconds)
    (before,) = await broker.jobs.depth()
    first, began = await next_figure(broker)
    beside = await interactive(broker, model, rate=arguments.rate, count=arguments.jobs, seed=seed)
    last, ended = await next_figure(broker)
    (after,) = await broker.jobs.depth()
    shared = (last - first - arguments.jobs * INTERACTIVE_TOKENS) / (ended - began)
    share = await flood(broker, model, 3 * arguments.rows, arguments.seconds)
    (worker,) = await broker.models.workers()
    figure = {
        "idle": waits(alone),
        "loaded": waits(beside),
        "p95_loaded_over_idle": percentile(beside, 95) / percentile(alone, 95),
        "batch_queued": [before.batch, after.batch],
        "batch_tokens_per_second_alone": batch_rate,
        "batch_tokens_per_second_beside": shared,
        "batch_kept": shared / batch_rate,
        "batch_share_in_a_flood": share,
        "preemptions": worker.stats["preemptions"],
        "batch_submitted_per_second": submitted,
        "load_average": machine.load_average(),
    }
    await cancel_all(broker, jobs)
    return figure


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds."""
    engine = EngineConfig(threads=arguments.threads, max_num_seqs=arguments.rows)
    async with whole_system(engine) as up, await Broker.open(up.config.broker) as broker:
        (card,) = await broker.models.cards()
        await interactive(broker, card.name, rate=arguments.rate, count=5, seed=999)  # warm
        rounds = [await round_of(broker, card.name, arguments, number) for number in range(arguments.rounds)]
    return {
        "what": "waits of interactive jobs beside a deep batch queue",
        "model": card.name,
        "rows": arguments.rows,
        "threads": arguments.threads,
        "interactive_per_second": arguments.rate,
        "tokens": {"interactive": INTERACTIVE_TOKENS, "batch": BATCH_TOKENS},
        "figures": rounds,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--batch", type=int, default=10_000, help="batch jobs queued")
    parser.add_argument("--jobs", type=int, default=200, help="interactive jobs of a round")
    parser.add_argument("--rate", type=float, default=5.0, help="interactive jobs a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="that batch is measured alone")
    add_worker_arguments(parser)
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments))
    sys.stdout.write("\n".join(table(FAIRNESS, numbered(result["figures"]))) + "\n")
    write(arguments.results / "fairness.json", result)


if __name__ == "__main__":
    main()
