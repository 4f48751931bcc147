"""Measures a backlog beside a chat: `python -m benchmarks.gpu.backlog [--device cuda] [--lines 2000]`.

Redis, gateway, control worker and worker run as under `ktqueue up`, with default settings. A file of completions with
random tokens goes through /v1/files and /v1/batches. Three times are taken: interactive requests alone, a batch alone,
and a batch beside the same interactive requests, which arrive at a fixed rate whether or not others were answered. Then
the engine alone, in this process, runs the lines of a batch, and decodes with several numbers of rows.
"""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx

from benchmarks import machine
from benchmarks.command import command_line, integers
from benchmarks.gpu.loaded_gpu_model import MODEL
from benchmarks.percentiles import percentiles
from benchmarks.queue.servers import whole_system
from benchmarks.queue.system import complete, stream_times
from benchmarks.results import write
from ktqueue.bench.engine import finish, measure_decode, prompts
from ktqueue.bench.environment import environment
from ktqueue.core.codec import dumps
from ktqueue.core.config import EngineConfig, ProfileConfig
from ktqueue.core.request import JobClass, SamplingParams
from ktqueue.engine.shared_steps import RECENT_SECONDS
from ktqueue.workers.startup.build import build

REPLY_SECONDS = 600.0
POLL_SECONDS = 0.25
ENDED = ("completed", "failed", "expired", "cancelled")


def batch_file(model: str, asked: list[list[int]], tokens: int) -> bytes:
    """A batch file with a greedy completion of exactly `tokens` tokens for each prompt."""
    body = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": prompt}}
        for number, prompt in enumerate(asked)
    ]
    return b"\n".join(dumps(line) for line in lines)


async def batch_tokens(http: httpx.AsyncClient) -> float:
    """Tokens that were generated for batch jobs so far, by the gateway's metrics."""
    metrics = (await http.get("/metrics")).text
    return sum(float(value) for value in re.findall(r"^\S*batch_tokens_total\S* (\S+)$", metrics, re.MULTILINE))


async def run_batch(http: httpx.AsyncClient, content: bytes, most_seconds: float) -> dict[str, Any]:
    """Submit a batch and wait for its end, or cancel it after `most_seconds`. Seconds count from its creation, after
    the upload."""
    before = await batch_tokens(http)
    uploaded = await http.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
    uploaded.raise_for_status()
    body = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    began = time.monotonic()
    made = await http.post("/v1/batches", json=body)
    made.raise_for_status()
    state = made.json()
    while state["status"] not in ENDED and time.monotonic() - began < most_seconds:
        await asyncio.sleep(POLL_SECONDS)
        state = (await http.get(f"/v1/batches/{state['id']}")).json()
    seconds = time.monotonic() - began
    if is_whole := state["status"] in ENDED:
        tokens = state["usage"]["output_tokens"]
    else:
        tokens = await batch_tokens(http) - before
        seconds = time.monotonic() - began
        (await http.post(f"/v1/batches/{state['id']}/cancel")).raise_for_status()
    while state["status"] not in ENDED:
        await asyncio.sleep(POLL_SECONDS)
        state = (await http.get(f"/v1/batches/{state['id']}")).json()
    return {"status": state["status"], **state["request_counts"], "output_tokens": tokens, "seconds": seconds,
            "is_whole": is_whole, "tokens_per_second": tokens / seconds}  # fmt: skip


@asynccontextmanager
async def chatting(
    http: httpx.AsyncClient, model: str, rate: float, arguments: argparse.Namespace, seed: int
) -> AsyncIterator[list[list[float]]]:
    """Interactive requests arrive at `rate` a second until the end of the block. Yields the moments of their frames."""
    streams: list[list[float]] = []

    async def ask(prompt: list[int]) -> None:
        streams.append(await complete(http, model, prompt, arguments.chat_tokens))

    async def arrive() -> None:
        asked = prompts(2000, arguments.prompt, arguments.vocabulary, seed=seed)
        async with asyncio.TaskGroup() as group:
            for prompt in asked:
                group.create_task(ask(prompt))
                await asyncio.sleep(1 / rate)

    arrivals = asyncio.create_task(arrive())
    try:
        yield streams
    finally:
        arrivals.cancel()
        await asyncio.gather(arrivals, return_exceptions=True)


def latency(streams: list[list[float]]) -> dict[str, Any]:
    """Percentiles of the time to the first token and between tokens, in milliseconds."""
    first, between = stream_times(streams)
    if not between:
        return {"requests": len(streams)}
    return {
        "requests": len(streams),
        **percentiles(first, 50, 95, 99, prefix="first_token_"),
        **percentiles(between, 50, 95, 99, prefix="between_tokens_"),
    }


async def served(engine: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """The three measurements through the gateway."""
    began = time.monotonic()
    async with (
        whole_system(engine, profile=ProfileConfig(folder=arguments.profile)) as up,
        httpx.AsyncClient(base_url=up.url, timeout=REPLY_SECONDS, trust_env=False) as http,
    ):
        name = (await http.get("/v1/models")).json()["data"][0]["id"]
        result: dict[str, Any] = {"probe_gb_s": [machine.bandwidth()]}
        sys.stderr.write(f"ready after {time.monotonic() - began:.0f} s, memory reads {result['probe_gb_s']} GB/s\n")
        async with chatting(http, name, arguments.rate, arguments, seed=1):  # warms up
            await asyncio.sleep(arguments.idle_seconds / 4)
        async with chatting(http, name, arguments.rate, arguments, seed=2) as streams:
            await asyncio.sleep(arguments.idle_seconds)
        result["chat_alone"] = latency(streams)
        sys.stderr.write(f"chat alone: {result['chat_alone']}\n")
        await asyncio.sleep(RECENT_SECONDS + 1)  # for so long after a chat, steps stay short
        for key, lines in (("batch_alone", arguments.lines), ("batch_beside_chat", arguments.lines_beside)):
            asked = prompts(lines, arguments.prompt, arguments.vocabulary, seed=len(key))
            content = batch_file(name, asked, arguments.tokens)
            if key == "batch_alone":
                result[key] = await run_batch(http, content, arguments.most_seconds)
            else:
                async with chatting(http, name, arguments.rate, arguments, seed=3) as streams:
                    result[key] = await run_batch(http, content, arguments.most_seconds)
                result["chat_beside_batch"] = latency(streams)
                sys.stderr.write(f"chat beside it: {result['chat_beside_batch']}\n")
            result["probe_gb_s"].append(machine.bandwidth())
            sys.stderr.write(f"{key}: {result[key]}\n")
    return result


def alone(engine: EngineConfig, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The engine alone with fixed numbers of rows: all lines with the most rows, then steps of each number."""
    most = max(arguments.rows)
    config = replace(engine, max_num_seqs=most, max_num_batched_tokens=max(most, engine.step_tokens))
    built = build(config)
    run = built.engine
    for number, prompt in enumerate(prompts(arguments.lines, arguments.prompt, arguments.vocabulary, seed=7)):
        sampling = SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True)
        run.add(str(number), prompt, sampling, job_class=JobClass.BATCH)
    began = time.monotonic()
    finish(run)
    seconds = time.monotonic() - began
    yield {"lines": arguments.lines, "rows": most, "seconds": seconds,
           "expert_bytes": run.model_stats().get("expert_bytes"),
           "tokens_per_second": arguments.lines * arguments.tokens / seconds,
           "probe_gb_s": machine.bandwidth()}  # fmt: skip
    for rows in sorted(arguments.rows):
        asked = prompts(rows, arguments.prompt, arguments.vocabulary, seed=rows)
        measured = measure_decode(run, asked, arguments.table_tokens)
        yield {"rows": rows, "step_ms": 1e3 * measured.step, "prompt_seconds": measured.first_token,
               "tokens_per_second": measured.tokens_per_second, "host_share": measured.host_share,
               "probe_gb_s": machine.bandwidth()}  # fmt: skip
    run.close()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default=MODEL, help="a model that a worker accepts")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--lines", type=int, default=2000, help="of the batch alone, and of the engine alone")
    parser.add_argument("--lines-beside", type=int, default=1000, help="of the batch beside interactive requests")
    parser.add_argument("--most-seconds", type=float, default=600.0, help="of a batch, which is cancelled then")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer in the batch")
    parser.add_argument("--chat-tokens", type=int, default=32, help="tokens of each interactive answer")
    parser.add_argument("--rate", type=float, default=2.0, help="interactive requests a second")
    parser.add_argument("--idle-seconds", type=float, default=20.0, help="of interactive requests alone")
    parser.add_argument("--rows", type=integers, default="64,128,256,512,1024,2048", help="of the engine alone")
    parser.add_argument("--table-tokens", type=int, default=24, help="tokens of each row where rows are compared")
    parser.add_argument("--profile", help="folder for profiles of the served part")
    parser.add_argument("--served-only", action="store_true", help="leave the engine alone out")
    parser.add_argument("--interactive-share", type=float, help="as the worker's flag; 0: no steps overlap")
    parser.add_argument("--max-num-seqs", type=int, help="as the worker's flag, by default auto")
    parser.add_argument("--name", default="", help="end of the result's name, by default the device")
    parser.add_argument("--vocabulary", type=int, default=500, help="ids that prompts are drawn from")
    arguments = parser.parse_args()
    engine = EngineConfig(model=arguments.model, device=arguments.device, max_num_seqs=arguments.max_num_seqs)
    if arguments.interactive_share is not None:
        engine = replace(engine, interactive_share=arguments.interactive_share)
    result = {"format": 1, "model": arguments.model, "device": arguments.device, "environment": environment(),
              "prompt_tokens": arguments.prompt, "tokens": arguments.tokens, "chat_tokens": arguments.chat_tokens,
              "rate": arguments.rate}  # fmt: skip
    path = arguments.results / f"backlog-{arguments.name or arguments.device}.json"
    result |= asyncio.run(served(engine, arguments))
    write(path, result)  # what follows takes minutes, too
    if arguments.served_only:
        return
    whole, *table = _told(alone(engine, arguments))
    result |= {"engine_alone": whole, "rows_alone": table,
               "share_of_engine": result["batch_alone"]["tokens_per_second"] / whole["tokens_per_second"]}  # fmt: skip
    write(path, result)


def _told(figures: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for figure in figures:
        sys.stderr.write(f"{figure}\n")
        yield figure


if __name__ == "__main__":
    main()
