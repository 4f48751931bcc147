"""Measures the whole system beside its engine: `python -m benchmarks.gpu.served [--device cuda] [--clients 1,4,64]`.

Redis, gateway and worker run as under `ktqueue up`. Clients each stream one completion of random tokens, all at the
same time, to its full length. Then the engine alone, in this process, gets the same requests. Figures are tokens a
second from the first request to the last token, the time to the first token and between tokens, and the distinct
experts that a layer of a step uses.
"""

import argparse
import asyncio
import sys
import time
from typing import Any

import httpx

from benchmarks import machine
from benchmarks.command import command_line, integers
from benchmarks.gpu.loaded_gpu_model import MODEL
from benchmarks.percentiles import percentiles
from benchmarks.queue.servers import whole_system
from benchmarks.queue.system import complete, stream_times
from benchmarks.results import write
from ktqueue.bench.engine import finish, prompts, start
from ktqueue.bench.environment import environment
from ktqueue.core.config import EngineConfig
from ktqueue.workers.startup.build import Built, build

REPLY_SECONDS = 600.0


async def together(http: httpx.AsyncClient, model: str, asked: list[list[int]], tokens: int) -> dict[str, Any]:
    """What clients see that all ask at once."""
    began = time.monotonic()
    streams = await asyncio.gather(*(complete(http, model, prompt, tokens) for prompt in asked))
    seconds = max(moments[-1] for moments in streams) - began
    first, between = stream_times(streams)
    return {
        "clients": len(asked),
        "tokens_per_second": len(asked) * tokens / seconds,
        **percentiles(first, 50, 99, prefix="first_token_"),
        **percentiles(between, 50, 99, prefix="between_tokens_"),
    }


def prompts_of_rounds(clients: int, arguments: argparse.Namespace) -> list[list[list[int]]]:
    """The prompts of all clients in each round; the first round warms up."""
    return [
        prompts(clients, arguments.prompt, arguments.vocabulary, seed=number) for number in range(arguments.rounds + 1)
    ]


async def served(engine: EngineConfig, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The best round of each number of clients."""
    best = []
    async with (
        whole_system(engine) as up,
        httpx.AsyncClient(base_url=up.url, timeout=REPLY_SECONDS, trust_env=False) as http,
    ):
        name = (await http.get("/v1/models")).json()["data"][0]["id"]
        for clients in arguments.clients:
            asked = prompts_of_rounds(clients, arguments)
            figures = [await together(http, name, each, arguments.tokens) for each in asked]
            best.append(max(figures[1:], key=lambda figure: float(figure["tokens_per_second"])))
            sys.stderr.write(f"served: {best[-1]}\n")
    return best


def alone(built: Built, asked: list[list[int]], tokens: int) -> float:
    """Tokens a second of the engine if it gets all prompts at once."""
    began = time.monotonic()
    start(built.engine, asked, tokens, {})
    finish(built.engine)
    return len(asked) * tokens / (time.monotonic() - began)


def experts_of_a_step(built: Built, asked: list[list[int]], tokens: int) -> float | None:
    """Distinct experts of a layer that the CPU computes in a step, on average. None if the model has no counter."""
    model: Any = built.model.module
    if not hasattr(model, "expert_layers_run"):
        return None
    layers, used = model.expert_layers_run, model.experts_used
    alone(built, asked, tokens)
    ran = model.expert_layers_run - layers
    return (model.experts_used - used) / ran if ran else None


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default=MODEL, help="a model that a worker accepts")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--clients", type=integers, default="1,4,64", help="clients at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=2, help="of each point, after one that warms up")
    parser.add_argument("--vocabulary", type=int, default=500, help="ids that prompts are drawn from")
    parser.add_argument("--gpu-expert-memory-bytes", type=int, default=0, help="of the worker")
    arguments = parser.parse_args()
    engine = EngineConfig(
        model=arguments.model,
        device=arguments.device,
        max_num_seqs=max(arguments.clients),
        enable_prefix_caching=False,
        gpu_expert_memory_bytes=arguments.gpu_expert_memory_bytes,
    )
    figures = asyncio.run(served(engine, arguments))
    built = build(engine)
    for figure in figures:
        asked = prompts_of_rounds(figure["clients"], arguments)
        figure["engine_alone"] = max([alone(built, each, arguments.tokens) for each in asked][1:])
        figure["share_of_engine"] = figure["tokens_per_second"] / figure["engine_alone"]
        figure["distinct_experts"] = experts_of_a_step(built, asked[0], arguments.tokens)
        figure["bandwidth_gb_s"] = machine.bandwidth()
        sys.stderr.write(f"alone: {figure}\n")
    result = {"format": 1, "model": arguments.model, "device": arguments.device, "environment": environment(),
              "prompt_tokens": arguments.prompt, "tokens": arguments.tokens, "figures": figures}  # fmt: skip
    built.engine.close()
    write(arguments.results / f"served-{arguments.device}.json", result)


if __name__ == "__main__":
    main()
