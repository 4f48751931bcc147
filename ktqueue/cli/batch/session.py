"""A batch run in a terminal: its progress bar, its signals, its summary."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ktqueue.batches.input import Survey, attempt_lines
from ktqueue.batches.output import BatchOutput
from ktqueue.batches.run import BatchRun, default_model, window_for, with_model
from ktqueue.broker.broker import Broker
from ktqueue.broker.models import find_card
from ktqueue.cli.terminal.progress import Bar
from ktqueue.core.config import BrokerConfig
from ktqueue.core.errors import ModelNotFound, Unavailable
from ktqueue.core.request import JobClass

REFRESH_SECONDS = 0.2
WORKER_CHECK_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """What to run, and how. `window`: lines that run at once; None: twice the rows of all workers."""

    source: Path
    target: Path
    model: str | None = None
    window: int | None = None
    job_class: JobClass = JobClass.BATCH
    overwrite: bool = False
    retry_failed: bool = False
    skip_invalid: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """State of a batch at the end of a run. `tokens` and times are of this run only; times in seconds."""

    total: int
    answered: int
    failed: int
    skipped: int
    tokens: int
    seconds: float
    tokens_per_second: float
    first_token_p50: float | None
    first_token_p95: float | None
    interrupted: bool
    output: str
    errors: str | None


async def session(config: BrokerConfig, job: BatchJob, found: Survey, output: BatchOutput) -> Summary:
    """Run the batch. The first SIGINT or SIGTERM lets the running lines finish; the second cancels.

    Raises ModelNotFound for a model that no worker serves, Unavailable, OSError, CancelledError.
    """
    skipped = len(output.ids)
    began = time.monotonic()
    broker = await Broker.open(config)
    try:
        default = None
        if skipped < found.lines:
            await _check_models(broker, found, job)
            default = None if job.model is not None else await default_model(broker, found, job.source)
        run = BatchRun(
            broker, output, window=job.window or await window_for(broker), model=job.model, job_class=job.job_class
        )
        interrupted = False
        with Bar("batch", found.lines) as bar:
            task = asyncio.current_task()

            def interrupt() -> None:
                nonlocal interrupted
                if interrupted and task is not None:
                    task.cancel()
                elif run.statistics.in_flight:
                    bar.say(f"finishing {run.statistics.in_flight} running lines; Ctrl-C again leaves them in Redis")
                interrupted = True
                run.stop()

            with _signals(interrupt):
                watcher = asyncio.create_task(_watch(broker, run, output, bar))
                try:
                    await run.run(with_model(attempt_lines(job.source), default))
                finally:
                    watcher.cancel()
                    _refresh(run, output, bar, "")
    finally:
        await broker.close()
    numbers = run.statistics
    return Summary(
        total=found.lines,
        answered=output.answered,
        failed=output.failed,
        skipped=skipped,
        tokens=numbers.tokens,
        seconds=round(time.monotonic() - began, 3),
        tokens_per_second=round(numbers.tokens_per_second, 1),
        first_token_p50=numbers.first_token_percentile(0.5),
        first_token_p95=numbers.first_token_percentile(0.95),
        interrupted=interrupted and len(output.ids) < found.lines,
        output=str(job.target),
        errors=str(output.error_path) if output.failed else None,
    )


@contextmanager
def _signals(interrupt: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _check_models(broker: Broker, found: Survey, job: BatchJob) -> None:
    """Check that every model is served, so that a mistake is reported once and not for each line."""
    cards = await broker.models.cards()
    served = [card.name for card in cards]
    if not served:
        raise Unavailable("no worker serves a model yet")
    for model, number in found.models.items():
        if find_card(cards, model) is None:
            where = "--model" if job.model is not None else f"{job.source}:{number}"
            hint = "" if job.model is not None else " (--model NAME replaces the model of the lines)"
            raise ModelNotFound(f"{where}: model {model!r} is not served; served: {', '.join(served)}{hint}")


async def _watch(broker: Broker, run: BatchRun, output: BatchOutput, bar: Bar) -> None:
    """Update the bar, and say which models have no worker, or that there is no Redis."""
    checked = time.monotonic()
    trouble = ""
    while True:
        _refresh(run, output, bar, trouble)
        await asyncio.sleep(REFRESH_SECONDS)
        if time.monotonic() - checked > WORKER_CHECK_SECONDS:
            try:
                missing = await _models_without_worker(broker, run)
                trouble = f"waiting for a worker of {', '.join(missing)}" if missing else ""
            except Unavailable:
                trouble = "waiting for Redis"
            checked = time.monotonic()


async def _models_without_worker(broker: Broker, run: BatchRun) -> list[str]:
    """Return the models of the lines in flight that no living worker serves."""
    served = {worker.model for worker in await broker.models.workers()}
    cards = await broker.models.cards()
    found = {name: find_card(cards, name) for name, lines in run.models.items() if lines}
    return sorted(name for name, card in found.items() if card is None or card.name not in served)


def _refresh(run: BatchRun, output: BatchOutput, bar: Bar, trouble: str) -> None:
    note = f"{run.statistics.tokens_per_second:.0f} tok/s"
    if output.failed:
        note = f"{output.failed} failed, {note}"
    bar.update(output.answered + output.failed, note=trouble or note)
