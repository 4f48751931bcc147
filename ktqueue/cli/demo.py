"""`ktqueue demo`: all of ktqueue on one page: start it, stream a tale over HTTP, run a batch, sum up, stop it."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ktqueue.cli.console import results, write
from ktqueue.cli.failures import ExitCode
from ktqueue.cli.flags import CommonFlags, EngineFlags, GatewayFlags, expand, settings
from ktqueue.cli.wrapped import Wrapped
from ktqueue.core.config import Config
from ktqueue.core.errors import KtqueueError, Unavailable

if TYPE_CHECKING:
    from ktqueue.cli.batch import Summary

STATE_DIR = ".state/demo"
QUESTION = "Tell me a story about a fox and a crow."
TALE_TOKENS = 220
FAREWELL = """
Everything is stopped. To go on from here:
  ktqueue up                    keep it running, for curl and the openai client
  ktqueue chat --local          talk with the model in this terminal
  ktqueue up --model FILE.gguf  serve a model of your own
  ktqueue --help                all the rest"""
LEAST_TOKENS, MORE_TOKENS = 48, 4  # of the batch's answers: each may be a bit longer than the one before
ANIMALS = ("fox", "crow", "bear", "mouse", "wolf", "hare", "goose", "cat")
PLACES = ("in the forest", "by the sea", "in a castle", "on a mountain")


@dataclass(frozen=True, slots=True)
class Tale:
    """How the streamed tale went. Times in seconds."""

    tokens: int
    first_token: float
    seconds: float


@expand
def demo(common: CommonFlags, engine: EngineFlags) -> None:
    """Start everything, stream a tale over HTTP, run a batch of 32 prompts, sum up, stop everything."""
    import asyncio

    common = replace(common, state_dir=common.state_dir or STATE_DIR)
    config = settings(common, engine=engine, gateway=GatewayFlags(host="127.0.0.1", port=0))
    config = replace(config, gateway=replace(config.gateway, api_keys=(), tenants=()))  # its own, for a minute
    if asyncio.run(_demo(config)):
        raise typer.Exit(ExitCode.INTERRUPTED)


async def _demo(config: Config) -> bool:
    """Run the demo; True if it was interrupted in the batch."""
    from ktqueue.batches.input import survey
    from ktqueue.batches.output import BatchOutput
    from ktqueue.cli.batch import BatchJob
    from ktqueue.cli.batch_session import session
    from ktqueue.cli.up import Waiting
    from ktqueue.workers.supervise import Supervisor, served_models

    console = results()
    began = time.monotonic()
    with Waiting() as waiting:
        supervisor = Supervisor(config, workers=1, report=waiting.say)
        await supervisor.__aenter__()
    try:
        config = supervisor.config
        model = (await served_models(config))[0]
        console.print(f"Redis, gateway and worker are up after {time.monotonic() - began:.1f} s.\n", markup=False)
        console.print(f"[bold]1  A tale over HTTP[/]  [dim]POST {supervisor.url}/v1/chat/completions[/]\n")
        tale = await _stream_tale(supervisor.url, model)
        source = Path(config.broker.state_dir) / "prompts.jsonl"
        lines = _write_prompts(source, model)
        console.print(f"[bold]2  A batch of {lines}[/]  [dim]ktqueue batch run {source} -o ...[/]\n", soft_wrap=True)
        job = BatchJob(source=source, target=source.with_name("answers.jsonl"), overwrite=True)
        output = BatchOutput(job.target, overwrite=True)
        try:
            summary = await session(config.broker, job, survey(source, model=None), output)
        finally:
            output.close(finished=True)
        if not summary.interrupted:
            _sum_up(tale, summary)
    finally:
        with Waiting() as waiting:
            waiting.say("stopping everything")
            await supervisor.stop()
    if summary.interrupted:
        return True
    if summary.failed:
        raise KtqueueError(f"{summary.failed} of the batch's lines failed: see {summary.errors}")
    console.print(FAREWELL, markup=False)
    return False


async def _stream_tale(url: str, model: str) -> Tale:
    """Ask for a tale and write it as it comes. Raises Unavailable, KtqueueError."""
    import httpx

    from ktqueue.cli.talkers import stream_document

    write(f"> {QUESTION}\n\n")
    body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": TALE_TOKENS,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 4,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    page = Wrapped(results().width)
    began = time.monotonic()
    first: float | None = None
    tokens = 0
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            response.raise_for_status()
            async for line in response.aiter_lines():
                document = stream_document(line)
                for choice in document.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        first = first if first is not None else time.monotonic() - began
                        page.add(text)
                    if choice["finish_reason"] == "length":
                        page.add(" ...")
                if document.get("usage"):
                    tokens = document["usage"]["completion_tokens"]
    except httpx.HTTPError as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error
    page.end()
    write("\n")
    return Tale(tokens, first or 0.0, time.monotonic() - began)


def _write_prompts(path: Path, model: str) -> int:
    prompts = [f"Tell me a story about a {animal} {place}." for animal in ANIMALS for place in PLACES]
    with path.open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts, 1):
            body = {
                "model": model,
                "max_tokens": LEAST_TOKENS + MORE_TOKENS * number,
                "temperature": 0.7,
                "seed": number,
                "messages": [{"role": "user", "content": prompt}],
            }
            line = {"custom_id": f"tale-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return len(prompts)


def _sum_up(tale: Tale, summary: "Summary") -> None:
    from rich.table import Table

    alone = (tale.tokens - 1) / max(tale.seconds - tale.first_token, 1e-9)
    rows = Table.grid(padding=(0, 3))
    rows.add_row("jobs", f"{1 + summary.answered} done, {summary.failed} failed")
    rows.add_row("tokens", f"{tale.tokens + summary.tokens}")
    rows.add_row("tale", f"first token after {1000 * tale.first_token:.0f} ms, then {alone:.0f} tok/s")
    if summary.first_token_p50 is not None and summary.first_token_p95 is not None:
        rows.add_row(
            "batch",
            f"first token after {1000 * summary.first_token_p50:.0f} ms (p50), "
            f"{1000 * summary.first_token_p95:.0f} ms (p95); {summary.tokens_per_second:.0f} tok/s",
        )
    rows.add_row("answers", summary.output)
    console = results()
    console.print("\n[bold]3  Summary[/]\n")
    console.print(rows, markup=False)
