"""Runs the lines of a batch file: a limited number of jobs in Redis, each line's record written when its jobs end.

This module knows neither file formats nor the terminal.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ktqueue.batches.errors import BatchFault
from ktqueue.batches.input import BatchLine, LineFault, Survey, line_id
from ktqueue.batches.line_jobs import failure_record, request_id
from ktqueue.batches.line_runner import LineOptions, LineRunner, Statistics
from ktqueue.batches.output import BatchOutput
from ktqueue.broker.broker import Broker
from ktqueue.core.errors import Unavailable
from ktqueue.core.request import JobClass

LEAST_WINDOW, LARGEST_WINDOW = 16, 8192
SKIPS_PER_PAUSE = 1_000  # finished lines that are skipped before other tasks run

Line = BatchLine | LineFault


async def window_for(broker: Broker) -> int:
    """Number of lines to keep in Redis: twice the rows of all workers."""
    rows = sum(worker.max_num_seqs for worker in await broker.models.workers())
    return min(max(2 * rows, LEAST_WINDOW), LARGEST_WINDOW)


async def default_model(broker: Broker, found: Survey, source: Path) -> str | None:
    """The model for lines that name none: the only one that is served. None if no line needs it.

    Raises BatchFault if several are served, Unavailable if none is.
    """
    if found.modelless is None:
        return None
    served = await broker.models.names()
    if not served:
        raise Unavailable("no worker serves a model yet")
    if len(served) > 1:
        raise BatchFault(
            f"{source}:{found.modelless}: names no model, and several are served "
            f"({', '.join(served)}): --model chooses one for all lines"
        )
    return served[0]


def with_model(lines: Iterable[Line], model: str | None) -> Iterator[Line]:
    """The lines, with `model` in those that name none."""
    for line in lines:
        if model is not None and isinstance(line, BatchLine) and line.body.get("model") is None:
            yield replace(line, body={**line.body, "model": model})
        else:
            yield line


class BatchRun:
    """One run. `model` replaces the lines' models; `window` is the number of lines in Redis at once."""

    def __init__(
        self,
        broker: Broker,
        output: BatchOutput,
        *,
        window: int,
        model: str | None = None,
        job_class: JobClass = JobClass.BATCH,
    ) -> None:
        self._runner = LineRunner(broker, LineOptions(model=model, job_class=job_class))
        self._output = output
        self._model = model
        self._window = asyncio.Semaphore(window)
        self._stopping = False
        self.models: Counter[str] = Counter()  # of the lines in flight

    @property
    def statistics(self) -> Statistics:
        """Figures of this run."""
        return self._runner.statistics

    def stop(self) -> None:
        """Submit no further lines. `run` returns when the lines in flight are written."""
        self._stopping = True

    async def run(self, lines: Iterable[Line]) -> None:
        """Run every line that has no record in the output. A faulty line gets a failure record.

        Raises Unavailable if Redis does not answer for a minute, and OSError.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for count, line in enumerate(lines):
                    if line.custom_id in self._output.ids:
                        if count % SKIPS_PER_PAUSE == 0:
                            await asyncio.sleep(0)
                        continue
                    if isinstance(line, LineFault):
                        name = f"batch-{self._output.run}-{line_id(line.number)}"
                        self._output.fail(failure_record(name, line.custom_id, line.info()))
                        continue
                    await self._window.acquire()
                    if self._stopping:
                        return
                    group.create_task(self._line(line))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _line(self, line: BatchLine) -> None:
        model = str(self._model or line.body.get("model"))
        self.models[model] += 1
        try:
            result = await self._runner.run(line, request_id(line, self._output.run, self._model))
            write = self._output.answer if result.failure is None else self._output.fail
            write(result.record)
        finally:
            self.models[model] -= 1
            self._window.release()
