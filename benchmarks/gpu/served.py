"""The whole of it beside its engine: `python -m benchmarks.gpu.served [--model M] [--device cuda] [--clients 1,4,64]`.

Redis, gateway and worker as `ktqueue up` runs them; so many clients at once stream one completion each, of random
tokens, to its full length. Then the engine alone, in this process, is given the same requests at the same moment. Of
both: tokens a second from the first request to the last token; of the clients also the time to the first token and
between tokens; how many distinct experts a layer of a step touches, where the model counts them.
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


async def served(config: Config, clients: list[int], given: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of the clients, the best of the rounds; the first round warms up."""
    async with (
        Supervisor(config, workers=1) as up,
        httpx.AsyncClient(base_url=up.url, timeout=START_SECONDS, trust_env=False) as http,
    ):
        name = (await http.get("/v1/models")).json()["data"][0]["id"]
        best = []
        for count in clients:
            taken = [
                await together(http, name, prompts(count, given.prompt, given.vocabulary, seed=turn), given.tokens)
                for turn in range(given.rounds + 1)
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
    """The command line."""
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
    given = parser.parse_args()
    clients = [int(one) for one in given.clients.split(",")]
    engine = EngineConfig(
        model=given.model,
        device=given.device,
        max_num_seqs=max(clients),
        enable_prefix_caching=False,
        gpu_expert_memory_bytes=given.gpu_expert_memory_bytes,
    )
    with tempfile.TemporaryDirectory() as folder:
        broker = BrokerConfig(state_dir=str(Path(folder) / "state"))
        config = Config(broker=broker, engine=engine, gateway=GatewayConfig(port=0))
        figures = asyncio.run(served(config, clients, given))
    built = build(engine)
    for one in figures:
        asked = [prompts(one["clients"], given.prompt, given.vocabulary, seed=turn) for turn in range(given.rounds + 1)]
        one["engine_alone"] = max([alone(built, each, given.tokens) for each in asked][1:])
        one["share_of_engine"] = one["tokens_per_second"] / one["engine_alone"]
        one["distinct_experts"] = experts_of_a_step(built, asked[0], given.tokens)
        one["bandwidth_gb_s"] = machine.bandwidth()
        sys.stderr.write(f"alone: {one}\n")
    result = {"format": 1, "model": given.model, "device": given.device, "environment": environment(),
              "prompt_tokens": given.prompt, "tokens": given.tokens, "figures": figures}  # fmt: skip
    built.engine.close()
    write(given.results / f"served-{given.device}.json", result)


if __name__ == "__main__":
    main()
