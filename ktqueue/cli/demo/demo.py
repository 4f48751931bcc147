"""`ktqueue demo`: stream a story while its worker is killed, run a batch, and show a summary."""

import json
import logging
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ktqueue.cli.flags import CommonFlags, EngineFlags, GatewayFlags, expand, settings
from ktqueue.cli.model import with_model
from ktqueue.cli.terminal.console import results, write
from ktqueue.cli.terminal.failures import ExitCode, require
from ktqueue.core.config import Config
from ktqueue.core.errors import KtqueueError

if TYPE_CHECKING:
    from ktqueue.cli.batch.session import Summary
    from ktqueue.cli.demo.story import Story
    from ktqueue.workers.supervision.supervisor import Supervisor

STATE_DIR = ".state/demo"
QUESTION = "Tell me a story about a fox and a crow."
STORY_TOKENS = 220
FAREWELL = """
Everything is stopped. What you can do next:
  {ktqueue} up                    start it again, for curl and the openai client
  {ktqueue} chat --local          talk with the model in this terminal
  {ktqueue} up --model FILE.gguf  serve a model of your own
  {ktqueue} --help                all commands"""
LEAST_TOKENS, MORE_TOKENS = 48, 4  # of the batch's answers: the limit grows from line to line
ANIMALS = ("fox", "crow", "bear", "mouse", "wolf", "hare", "goose", "cat")
PLACES = ("in the forest", "by the sea", "in a castle", "on a mountain")


@expand
def demo(common: CommonFlags, engine: EngineFlags) -> None:
    """Start everything, stream a story while its worker is killed, run a batch of 32 prompts, stop everything."""
    import asyncio

    require("gateway", "worker")
    logging.getLogger("ktqueue").setLevel(logging.ERROR)  # the worker's death is expected here
    common = replace(common, state_dir=common.state_dir or STATE_DIR)
    config = with_model(settings(common, engine=engine, gateway=GatewayFlags(host="127.0.0.1", port=0)))
    config = replace(
        config, gateway=replace(config.gateway, api_keys=(), tenants=())
    )  # a private gateway that runs for a minute
    if asyncio.run(_demo(config)):
        raise typer.Exit(ExitCode.INTERRUPTED)


async def _demo(config: Config) -> bool:
    """Run the demo; True if it was interrupted in the batch."""
    from ktqueue.batches.input import survey
    from ktqueue.batches.output import BatchOutput
    from ktqueue.cli.batch.session import BatchJob, session
    from ktqueue.cli.terminal.progress import Waiting
    from ktqueue.workers.supervision.supervisor import Supervisor, served_models

    console = results()
    began = time.monotonic()
    with Waiting() as waiting:
        supervisor = Supervisor(config, workers=1, report=waiting.say)
        await supervisor.__aenter__()
    try:
        config = supervisor.config
        model = (await served_models(config))[0]
        console.print(f"Redis, gateway and worker are up after {time.monotonic() - began:.1f} s.\n", markup=False)
        console.print(
            f"[bold]1  A story over HTTP, and kill -9[/]  [dim]POST {supervisor.url}/v1/chat/completions[/]\n"
        )
        story, equal = await _tell_stories(supervisor, model)
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
            _sum_up(story, equal, summary)
    finally:
        with Waiting() as waiting:
            waiting.say("stopping everything")
            await supervisor.stop()
    if summary.interrupted:
        return True
    if summary.failed:
        raise KtqueueError(f"{summary.failed} of the batch's lines failed: see {summary.errors}")
    console.print(FAREWELL.format(ktqueue=_command()), markup=False, soft_wrap=True)
    return False


async def _tell_stories(supervisor: "Supervisor", model: str) -> tuple["Story", int]:
    """Stream a story while its worker is killed, then stream it again without that.

    Returns the first story and the number of leading tokens that are equal. Raises Unavailable, and KtqueueError if
    tokens differ although the model's arithmetic is exact.
    """
    from ktqueue.broker.broker import Broker
    from ktqueue.cli.demo.story import StoryPage, TooLate, stream_story

    write(f"> {QUESTION}\n\n")
    body = {
        "model": model,
        "max_tokens": STORY_TOKENS,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 4,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    page = StoryPage()
    broker = await Broker.open(supervisor.config.broker)
    try:
        kill_at, story = STORY_TOKENS // 3, None
        while story is None:
            try:
                story = await stream_story(
                    supervisor.url, body, broker, page=page, victim=supervisor.workers[0], kill_at=kill_at
                )
            except TooLate:  # the machine is so busy that this process reads long after the worker writes
                if kill_at == 1:
                    raise
                kill_at = max(1, kill_at // 8)
                page.end(complete=False)
                write("The story was complete before its worker was dead. Trying again:\n\n")
        page.end(complete=len(story.token_ids) < STORY_TOKENS)
        undisturbed = await stream_story(supervisor.url, body, broker)
    finally:
        await broker.close()
    pairs = zip(story.token_ids, undisturbed.token_ids, strict=False)
    equal = next((i for i, (token, other) in enumerate(pairs) if token != other), len(story.token_ids))
    engine = supervisor.config.engine
    exact = (engine.model, engine.device) == ("demo", "cpu") and engine.dtype in ("auto", "float32")
    if story.token_ids != undisturbed.token_ids and exact:
        raise KtqueueError(f"token {equal + 1} after the kill is not that of the undisturbed run")
    return story, equal


def _command() -> str:
    """Return how to call `ktqueue` here. `make demo` installs it into a folder that is not on PATH."""
    if shutil.which("ktqueue"):
        return "ktqueue"
    beside = Path(sys.executable).with_name("ktqueue")
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)


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
            line = {"custom_id": f"story-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return len(prompts)


def _sum_up(story: "Story", equal: int, summary: "Summary") -> None:
    from rich.table import Table

    assert story.takeover is not None
    count, gap = len(story.token_ids), story.takeover.seconds
    alone = (count - 1) / max(story.seconds - story.first_token - gap, 1e-9)
    same = f"all {count} tokens equal" if equal == count else f"the first {equal} of {count} tokens equal"
    rows = Table.grid(padding=(0, 3))
    rows.add_row("jobs", f"{2 + summary.answered} done, {summary.failed} failed")
    rows.add_row("tokens", f"{2 * count + summary.tokens}")
    rows.add_row("story", f"first token after {1000 * story.first_token:.0f} ms, then {alone:.0f} tok/s")
    rows.add_row("kill -9", f"{1000 * gap:.0f} ms without text; {same} those of an undisturbed run")
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
