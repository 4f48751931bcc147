"""Kills workers while they write JSON: `python -m tests.chaos.documents [--kills 1000] [--workers 2] [--seed 1]`.

An installation with real processes answers jobs that must match schemas. Whenever a reader has seen a few events of a
document, its worker gets SIGKILL. First each job runs undisturbed. Afterwards the tokens and the text of each job must
be the same, to the byte, and valid. Exits with 1 if they are not, or if a job did not end.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.results import RESULTS, write
from ktqueue.broker.broker import Broker
from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig, WorkerConfig
from ktqueue.core.events import JobState
from ktqueue.core.request import GenerationRequest, SamplingParams
from ktqueue.openai.json_schema import lark_of_schema
from ktqueue.workers.supervision.supervisor import Supervisor
from tests.soak.schemas import SCHEMAS

STREAMS = 8  # documents that are written at the same time
LATEST = 60  # the last event of a document after which its worker may be killed
LONGEST = 300  # tokens of a document
JOB_SECONDS = 300.0

Choice = tuple[list[int], str]


def requests(seed: int, count: int) -> list[GenerationRequest]:
    """A seeded request for each of the first `count` schemas from the largest on."""
    return [
        GenerationRequest(
            model="demo",
            messages=({"role": "user", "content": f"Tell me about animal {number} as JSON."},),
            sampling=SamplingParams(seed=seed + number, temperature=0.9, max_tokens=LONGEST, n=1 + number % 2),
            grammar=lark_of_schema(schema, "schema"),
        )
        for number, schema in enumerate(_largest(count))
    ]


def _largest(count: int) -> list[Any]:
    return sorted(SCHEMAS, key=lambda schema: len(json.dumps(schema)), reverse=True)[:count]


class Killer:
    """Reads jobs and kills their workers. `kills`: how many so far; `hit`: documents that were being written."""

    def __init__(self, up: Supervisor, broker: Broker, target: int, draw: random.Random) -> None:
        self._up = up
        self._broker = broker
        self._target = target
        self._draw = draw
        self._writing: dict[str, int] = {}  # jobs with at least one event and no end, with their number of events
        self.kills = 0
        self.hit = 0

    async def result(self, request: GenerationRequest, *, kill: bool) -> list[Choice]:
        """Run a job to its end and return its choices. With `kill` its worker dies at a random event."""
        job = await self._broker.jobs.submit(request)
        choices: list[Choice] = [([], "") for _ in range(request.sampling.n)]
        kill_at = self._draw.randint(1, LATEST) if kill else 0
        try:
            async with asyncio.timeout(JOB_SECONDS):
                async for event in self._broker.journal.follow(job.id):
                    ids, text = choices[event.index]
                    choices[event.index] = ([*ids, *event.token_ids], text + event.text)
                    self._writing[job.id] = event.seq
                    if event.state not in (None, JobState.DONE):
                        raise AssertionError(f"{job.id} ended as {event.state}: {event.error}")
                    if event.seq == kill_at and event.state is None and self.kills < self._target:
                        await self._kill(job.id)
                        kill_at += self._draw.randint(1, LATEST)
        finally:
            self._writing.pop(job.id, None)
        return choices

    async def _kill(self, job_id: str) -> None:
        """SIGKILL the worker that writes this document."""
        worker_id = (await self._broker.jobs.get(job_id)).worker_id
        for worker in await self._broker.models.workers():
            if worker.worker_id == worker_id and worker.pid in {child.pid for child in self._up.workers}:
                running = [name for name in list(self._writing) if await self._runs_on(name, worker_id)]
                try:
                    os.kill(worker.pid, signal.SIGKILL)
                except ProcessLookupError:  # another document's reader killed it just before
                    return
                self.kills += 1
                self.hit += len(running)
                return

    async def _runs_on(self, job_id: str, worker_id: str) -> bool:
        return (await self._broker.jobs.get(job_id)).worker_id == worker_id


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all documents undisturbed, then again and again while workers are killed."""
    draw = random.Random(arguments.seed)
    asked = requests(1000 * arguments.seed, arguments.schemas)
    with tempfile.TemporaryDirectory(prefix="documents-") as folder:
        config = Config(
            broker=BrokerConfig(state_dir=folder, lease_seconds=1.0, max_attempts=1_000_000),
            engine=EngineConfig(num_pages=512, threads=1, max_num_seqs=STREAMS),
            worker=WorkerConfig(drain_seconds=0.5),
            gateway=GatewayConfig(port=0),
        )
        async with Supervisor(config, workers=arguments.workers) as up, await Broker.open(up.config.broker) as broker:
            killer = Killer(up, broker, arguments.kills, draw)
            gate = asyncio.Semaphore(STREAMS)

            async def run_once(number: int, *, kill: bool) -> tuple[int, list[Choice]]:
                async with gate:
                    return number, await killer.result(asked[number], kill=kill)

            undisturbed = dict(await asyncio.gather(*(run_once(number, kill=False) for number in range(len(asked)))))
            began = time.monotonic()
            different: Counter[int] = Counter()
            documents = 0
            while killer.kills < arguments.kills and time.monotonic() < began + 60 * arguments.minutes:
                for number, choices in await asyncio.gather(
                    *(run_once(place, kill=True) for place in range(len(asked)))
                ):
                    documents += len(choices)
                    different[number] += choices != undisturbed[number]
            seconds = time.monotonic() - began
    whole = [
        (_largest(arguments.schemas)[number], text)
        for number, choices in undisturbed.items()
        for ids, text in choices
        if len(ids) < LONGEST
    ]
    return {
        "what": "workers killed with SIGKILL while they write JSON that must match a schema",
        "workers": arguments.workers,
        "seconds": seconds,
        "kills": killer.kills,
        "documents": documents,
        "documents_being_written_at_a_kill": killer.hit,
        "different": sum(different.values()),
        "not_valid": sum(not _is_valid(schema, text) for schema, text in whole),
    }


def _is_valid(schema: Any, text: str) -> bool:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(json.loads(text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60.0, help="the longest time")
    parser.add_argument("--schemas", type=int, default=len(SCHEMAS), help="only the largest ones")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a folder to write documents.json to")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    result = asyncio.run(measure(arguments))
    for name, value in result.items():
        sys.stdout.write(f"{name}: {value}\n")
    write((arguments.results or RESULTS) / "documents.json", result)
    sys.exit(bool(result["different"] or result["not_valid"]))


if __name__ == "__main__":
    main()
