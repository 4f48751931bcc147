"""Measures the whole system beside its engine: `python -m benchmarks.gpu.served [--device cuda] [--clients 1,4,64]`.

Redis, gateway and worker run as under `ktqueue up`. Clients each stream one completion of random tokens, all at the
same time, to its full length. Then the engine alone, in this process, gets the same requests. Figures are tokens a
second from the first request to the last token, the time to the first token and between tokens, and the distinct
experts that a layer of a step uses.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks import machine
from benchmarks.queue.system import frames, percentile
from benchmarks.results import RESULTS, write
from ktqueue.bench.engine import prompts
from ktqueue.bench.environment import environment
from ktqueue.core.config import BrokerConfig, Config, EngineConfig, GatewayConfig
from ktqueue.core.request import SamplingParams
from ktqueue.workers.startup.build import Built, build
from ktqueue.workers.supervision.supervisor import Supervisor

START_SECONDS = 600.0  # for a large model to load


async def stream(http: httpx.AsyncClient, model: str, prompt: list[int], tokens: int) -> list[float]:
    """The moments at which a client has text, the first that of its request."""
    body = {"model": model, "prompt": prompt, "stream": True, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    moments = [time.monotonic()]
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _, data in frames(response):
            if data["choices"]:
                moments.append(time.monotonic())
    return moments


async def together(http: httpx.AsyncClient, model: str, asked: list[list[int]], tokens: int) -> dict[str, Any]:
    """What all clients see who ask at once."""
    began = time.monotonic()
    seen = await asyncio.gather(*(stream(http, model, prompt, tokens) for prompt in asked))
    seconds = max(moments[-1] for moments in seen) - began
    first = [1e3 * (moments[1] - moments[0]) for moments in seen]
    gaps = [1e3 * (after - before) for moments in seen for before, after in pairwise(moments[1:])]
    return {
        "clients": len(asked),
        "tokens_per_second": len(asked) * tokens / seconds,
        "first_token_p50_ms": percentile(first, 0.5),
        "first_token_p99_ms": percentile(first, 0.99),
        "between_tokens_p50_ms": percentile(gaps, 0.5),
        "between_tokens_p99_ms": percentile(gaps, 0.99),
    }


async def served(config: Config, clients: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of the clients, the best of the rounds; the first round warms up."""
    async with (
        Supervisor(config, workers=1) as up,
        httpx.AsyncClient(base_url=up.url, timeout=START_SECONDS, trust_env=False) as http,
    ):
        name = (await http.get("/v1/models")).json()["data"][0]["id"]
        best = []
        for count in clients:
            taken = [
                await together(
                    http, name, prompts(count, arguments.prompt, arguments.vocabulary, seed=turn), arguments.tokens
                )
                for turn in range(arguments.rounds + 1)
            ]
            best.append(max(taken[1:], key=lambda one: one["tokens_per_second"]))
            sys.stderr.write(f"served: {best[-1]}\n")
        return best


def alone(built: Built, asked: list[list[int]], tokens: int) -> float:
    """Tokens a second of the engine that is given all at once."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    began = time.monotonic()
    for row, prompt in enumerate(asked):
        built.engine.add(str(row), prompt, sampling)
    while built.engine.has_work:
        built.engine.step()
    return len(asked) * tokens / (time.monotonic() - began)


def experts_of_a_step(built: Built, asked: list[list[int]], tokens: int) -> float | None:
    """Distinct experts of a layer that the CPU computes in a step, on average; None: nobody counts."""
    model: Any = built.model.module
    if not hasattr(model, "expert_layers_run"):
        return None
    layers, used = model.expert_layers_run, model.experts_used
    alone(built, asked, tokens)
    ran = model.expert_layers_run - layers
    return (model.experts_used - used) / ran if ran else None


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="synthetic:qwen3-30b-a3b:q4_k_m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", default="1,4,64", help="clients at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=2, help="of each point, after one that warms up")
    parser.add_argument("--vocabulary", type=int, default=500, help="ids that prompts are drawn from")
    parser.add_argument("--gpu-expert-memory-bytes", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    clients = [int(one) for one in arguments.clients.split(",")]
    engine = EngineConfig(
        model=arguments.model,
        device=arguments.device,
        max_num_seqs=max(clients),
        enable_prefix_caching=False,
        gpu_expert_memory_bytes=arguments.gpu_expert_memory_bytes,
    )
    with tempfile.TemporaryDirectory() as folder:
        broker = BrokerConfig(state_dir=str(Path(folder) / "state"))
        config = Config(broker=broker, engine=engine, gateway=GatewayConfig(port=0))
        figures = asyncio.run(served(config, clients, arguments))
    built = build(engine)
    for one in figures:
        asked = [
            prompts(one["clients"], arguments.prompt, arguments.vocabulary, seed=turn)
            for turn in range(arguments.rounds + 1)
        ]
        one["engine_alone"] = max([alone(built, each, arguments.tokens) for each in asked][1:])
        one["share_of_engine"] = one["tokens_per_second"] / one["engine_alone"]
        one["distinct_experts"] = experts_of_a_step(built, asked[0], arguments.tokens)
        one["bandwidth_gb_s"] = machine.bandwidth()
        sys.stderr.write(f"alone: {one}\n")
    result = {"format": 1, "model": arguments.model, "device": arguments.device, "environment": environment(),
              "prompt_tokens": arguments.prompt, "tokens": arguments.tokens, "figures": figures}  # fmt: skip
    built.engine.close()
    write(arguments.results / f"served-{arguments.device}.json", result)


if __name__ == "__main__":
    main()
