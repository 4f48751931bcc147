"""Measures how long a tenant waits behind another one's backlog: `python -m benchmarks.queue.tenants`.

One real worker runs the built-in model over a private Redis, as under `ktqueue up`. A tenant sends many long requests
at once, which fill all rows for a long time. Then another tenant sends short ones, one after another at a fixed rate.
wait: from the call that submits a job to its first token at a reader of its journal. kept: tokens of both tenants a
second, relative to those of the backlog alone. All jobs are interactive. The command prints a table and writes
results/tenants.json, which keeps the figures of other labels.
"""

import argparse
import asyncio
import json
import sys
from typing import Any

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.engine.compare import PROMPTS
from benchmarks.queue.fairness import (
    SETTLE_SECONDS,
    add_worker_arguments,
    batch_alone,
    cancel_all,
    first_token_waits,
    next_figure,
    waits,
)
from benchmarks.queue.page import TENANTS
from benchmarks.queue.servers import whole_system
from benchmarks.results import write
from benchmarks.tables import numbered, table
from ktqueue.broker.broker import Broker
from ktqueue.core.config import EngineConfig
from ktqueue.core.request import GenerationRequest, SamplingParams


def request(model: str, number: int, tokens: int) -> GenerationRequest:
    """A different prompt for each number."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(model=model, prompt=f"Tale {number}. {PROMPTS[number % len(PROMPTS)]}", sampling=sampling)


async def newcomers(broker: Broker, model: str, arguments: argparse.Namespace) -> list[float]:
    """Seconds that each short job of the other tenant waited for its first token."""
    requests = [request(model, number, arguments.short_tokens) for number in range(arguments.jobs)]
    return await first_token_waits(broker, requests, lambda: 1 / arguments.rate, tenant="short")


async def round_of(broker: Broker, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One round: short jobs alone, the backlog alone, then both."""
    alone = await newcomers(broker, model, arguments)
    long = [
        broker.jobs.submit(request(model, number, arguments.long_tokens), tenant="long")
        for number in range(arguments.backlog)
    ]
    backlog = await asyncio.gather(*long)
    await asyncio.sleep(SETTLE_SECONDS)
    rate = await batch_alone(broker, arguments.seconds)
    first, began = await next_figure(broker)
    behind = await newcomers(broker, model, arguments)
    last, ended = await next_figure(broker)
    (worker,) = await broker.models.workers()
    figure = {
        "label": arguments.label,
        "idle": waits(alone),
        "behind": waits(behind),
        "backlog_tokens_per_second_alone": rate,
        "kept": (last - first) / (ended - began) / rate,
        "preemptions": worker.stats["preemptions"],
        "load_average": machine.load_average(),
    }
    await cancel_all(broker, [job.id for job in backlog])
    return figure


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds."""
    engine = EngineConfig(threads=arguments.threads, max_num_seqs=arguments.rows)
    async with whole_system(engine) as up, await Broker.open(up.config.broker) as broker:
        (card,) = await broker.models.cards()
        rounds = [await round_of(broker, card.name, arguments) for _ in range(arguments.rounds)]
    path = arguments.results / "tenants.json"
    others = json.loads(path.read_text())["figures"] if path.exists() else []
    return {
        "what": "waits of one tenant behind the backlog of another",
        "model": card.name,
        "rows": arguments.rows,
        "threads": arguments.threads,
        "backlog": arguments.backlog,
        "tokens": {"long": arguments.long_tokens, "short": arguments.short_tokens},
        "short_per_second": arguments.rate,
        "figures": [figure for figure in others if figure["label"] != arguments.label] + rounds,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--label", default="turns", help="name of this code in the table")
    parser.add_argument("--backlog", type=int, default=400, help="long requests of the first tenant")
    parser.add_argument("--long-tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--short-tokens", type=int, default=16, help="tokens of each answer of the other tenant")
    parser.add_argument("--jobs", type=int, default=20, help="short requests of a round")
    parser.add_argument("--rate", type=float, default=4.0, help="short requests a second")
    parser.add_argument("--seconds", type=float, default=3.0, help="that the backlog is measured alone")
    add_worker_arguments(parser)
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments))
    sys.stdout.write("\n".join(table(TENANTS, numbered(result["figures"]))) + "\n")
    write(arguments.results / "tenants.json", result)


if __name__ == "__main__":
    main()
