"""Runs one queue with 1, 2, 4 and 8 workers: `python -m tests.soak.fleet`.

Each fleet, with Redis, gateway and fork server as under `ktqueue up`, gets the same greedy jobs of the built-in model
at once. In a second run workers leave meanwhile, one after the other by SIGTERM, and return. Each job must end once, as
done, with the tokens that a fleet of one gave it. The command prints a table and writes results/crew.json.
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.engine.compare import PROMPTS
from benchmarks.queue.page import FLEET
from benchmarks.queue.servers import whole_system
from benchmarks.results import write
from benchmarks.tables import table
from ktqueue.broker.broker import Broker
from ktqueue.core.config import EngineConfig, WorkerConfig
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, JobClass, SamplingParams
from ktqueue.workers.supervision.child import Child

FLEETS = (1, 2, 4, 8)
SUBMITTERS = 16
LOOK_SECONDS = 0.02
Output = tuple[tuple[int, ...], str]


def request(number: int, tokens: int) -> GenerationRequest:
    """Make a request with its own prompt for each number."""
    return GenerationRequest(
        model="demo",
        prompt=f"Output {number}. {PROMPTS[number % len(PROMPTS)]}",
        sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        job_class=JobClass.BATCH,
    )


async def submit(broker: Broker, count: int, tokens: int) -> list[str]:
    """Submit `count` jobs and return their ids in order."""
    numbers, jobs = iter(range(count)), [""] * count

    async def some() -> None:
        for number in numbers:
            jobs[number] = (await broker.jobs.submit(request(number, tokens))).id

    await asyncio.gather(*(some() for _ in range(SUBMITTERS)))
    return jobs


async def ended(broker: Broker) -> None:
    """Wait until no job waits or runs."""
    while True:
        (depth,) = await broker.jobs.depth()
        if depth.batch + depth.running == 0:
            return
        await asyncio.sleep(LOOK_SECONDS)


async def outputs(broker: Broker, jobs: Sequence[str]) -> list[Output]:
    """Return token ids and text of each job. Both are empty unless it is done, ended once, and has no gap."""
    texts: list[Output] = []
    for job in jobs:
        events = await broker.journal.replay(job)
        whole = [event.seq for event in events] == list(range(1, len(events) + 1))
        ends = [event.state for event in events if event.state is not None]
        ids = tuple(token for event in events for token in event.token_ids)
        good = whole and ends == [JobState.DONE] and events[-1].state is JobState.DONE
        texts.append((ids, "".join(event.text for event in events)) if good else ((), ""))
    return texts


async def come_and_go(workers: Sequence[Child], pause: float, seed: int) -> None:
    """Every `pause` seconds, drain a worker, which its supervisor then restarts. Runs until cancelled."""
    draw = random.Random(seed)
    while True:
        await asyncio.sleep(pause)
        draw.choice(workers).signal(signal.SIGTERM)


async def work(size: int, arguments: argparse.Namespace) -> list[tuple[dict[str, Any], list[Output]]]:
    """Return figures and outputs of a fleet: first undisturbed, then with workers that leave and return."""
    engine = EngineConfig(threads=1, max_num_seqs=arguments.rows, num_pages=512)
    async with (
        whole_system(engine, workers=size, worker=WorkerConfig(drain_seconds=0.0)) as up,
        await Broker.open(up.config.broker) as broker,
    ):
        await submit(broker, 2 * size * arguments.rows, arguments.tokens)  # warms up
        await ended(broker)
        results = []
        for restless in (False, True):
            began, deaths = time.perf_counter(), sum(worker.deaths for worker in up.workers)
            jobs = await submit(broker, arguments.jobs, arguments.tokens)
            going = asyncio.create_task(
                come_and_go(up.workers, arguments.pause, size) if restless else asyncio.sleep(0)
            )
            await ended(broker)
            seconds = time.perf_counter() - began
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)
            texts = await outputs(broker, jobs)
            figure = {
                "workers": size,
                "left": sum(worker.deaths for worker in up.workers) - deaths,
                "seconds": seconds,
                "jobs_per_second": arguments.jobs / seconds,
                "tokens_per_second": sum(len(ids) for ids, _ in texts) / seconds,
                "load_average": machine.load_average(),
            }
            results.append((figure, texts))
    return results


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all fleets."""
    figures: list[dict[str, Any]] = []
    reference: list[Output] | None = None
    for size in FLEETS:
        for figure, texts in await work(size, arguments):
            reference = reference or texts
            wrong = sum(output != expected or not output[0] for output, expected in zip(texts, reference, strict=True))
            figures.append({**figure, "wrong": wrong})
            sys.stdout.write(f"{figures[-1]}\n")
            sys.stdout.flush()
    return {
        "what": "one queue, several workers",
        "rows": arguments.rows,
        "jobs": arguments.jobs,
        "tokens": arguments.tokens,
        "pause": arguments.pause,
        "figures": figures,
    }


def main() -> None:
    """Run the command line. Exits with 1 if a job was lost or has other tokens."""
    parser = command_line(__doc__)
    parser.add_argument("--jobs", type=int, default=1200, help="jobs of a fleet")
    parser.add_argument("--tokens", type=int, default=48, help="of each job")
    parser.add_argument("--rows", type=int, default=8, help="rows of each worker's engine")
    parser.add_argument("--pause", type=float, default=2.5, help="seconds until the next worker leaves")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments))
    sys.stdout.write("\n".join(table(FLEET, result["figures"])) + "\n")
    write(arguments.results / "crew.json", result)
    sys.exit(any(figure["wrong"] for figure in result["figures"]))


if __name__ == "__main__":
    main()
