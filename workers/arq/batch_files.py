"""BatchFiles: a folder for batch files and their answers.

`in/NAME.jsonl` is run. Answers are appended to `out/NAME.jsonl`, and failures to `out/NAME.errors.jsonl`. Then the
input is moved to `done/`. An input that cannot be run is moved to `failed/`, with the reason in `NAME.jsonl.txt`. Write
files elsewhere and move them into `in/`. `ktqueue.batches` does the actual runs.
"""

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

from ktqueue.batches.errors import BatchFault, OutputLocked
from ktqueue.batches.input import Survey, read_lines, survey
from ktqueue.batches.output import BatchOutput
from ktqueue.batches.run import BatchRun, default_model, window_for, with_model
from ktqueue.broker.broker import Broker
from ktqueue.core.config import ControlConfig
from ktqueue.core.errors import InvalidRequest, Unavailable
from ktqueue.workers.arq.worker import Retry

MAX_RUNNING = 4  # batches that one process runs at once, so that webhooks are not held up
RETRY_SECONDS = 5.0  # when a batch cannot run now
MAX_NAME_BYTES = 240  # of an input, so that the names of its other files fit in 255
FOLDERS = ("in", "out", "done", "failed")

log = logging.getLogger(__name__)


class BatchFiles:
    """The folder `control.batch_dir`. If it is not set, there are no batch files."""

    def __init__(self, broker: Broker, config: ControlConfig) -> None:
        self._broker = broker
        self._root = None if config.batch_dir is None else Path(config.batch_dir)
        self._keep = config.keep_files
        self._running = 0

    def waiting(self) -> list[str]:
        """Names of the inputs to run. Those whose names cannot be used are refused. Raises OSError."""
        if self._root is None:
            return []
        self._make_folders()
        sources = [path for path in sorted((self._root / "in").glob("*.jsonl")) if path.is_file()]
        faults = {path: fault for path in sources if (fault := _fault_of(path.name))}
        for path, fault in faults.items():
            self._refuse(path, fault)
        return [path.name for path in sources if path not in faults]

    async def run(self, context: dict[str, Any], name: str, model: str | None = None) -> dict[str, Any]:
        """Run one input to its end. Returns the numbers of lines, answers and failures. `model` overrides theirs.

        If it is cancelled or killed and then run again, it continues and finds the jobs that it had submitted. Raises
        InvalidRequest and OSError, or Retry if it cannot run now.
        """
        if self._root is None or Path(name).name != name or not name.endswith(".jsonl"):
            raise InvalidRequest(f"{name!r} is not a batch file of control.batch_dir", param="name", value=name)
        source = self._root / "in" / name
        if not await asyncio.to_thread(source.is_file):
            raise InvalidRequest(f"{source}: no such file", param="name", value=name)
        if self._running >= MAX_RUNNING:
            raise Retry(RETRY_SECONDS)
        self._running += 1
        try:
            await asyncio.to_thread(self._make_folders)
            return await self._run(source, model)
        except (OutputLocked, Unavailable) as fault:
            raise Retry(RETRY_SECONDS) from fault
        except BatchFault as fault:
            await asyncio.to_thread(self._refuse, source, fault.message)
            raise
        finally:
            self._running -= 1

    async def purge(self, context: dict[str, Any]) -> int:
        """Remove files older than `control.keep_files`, except those of waiting inputs. Returns their number."""
        return await asyncio.to_thread(self._purge)

    async def _run(self, source: Path, model: str | None) -> dict[str, Any]:
        assert self._root is not None
        contents = await asyncio.to_thread(survey, source, model=model)
        output = await asyncio.to_thread(self._output, source.name, contents)
        finished = False
        try:
            window = await window_for(self._broker)
            log.info("batch %s: %d of %d lines remain", source.name, contents.lines - len(output.ids), contents.lines)
            default = None if model is not None else await default_model(self._broker, contents, source)
            run = BatchRun(self._broker, output, window=window, model=model)
            await run.run(with_model(read_lines(source), default))
            finished = len(output.ids) == contents.lines
        finally:
            output.close(finished=finished)
        await asyncio.to_thread(source.replace, self._root / "done" / source.name)
        log.info("batch %s: %d answered, %d failed", source.name, output.answered, output.failed)
        return {"lines": contents.lines, "answered": output.answered, "failed": output.failed}

    def _make_folders(self) -> None:
        assert self._root is not None
        for folder in FOLDERS:
            (self._root / folder).mkdir(parents=True, exist_ok=True)

    def _output(self, name: str, contents: Survey) -> BatchOutput:
        assert self._root is not None
        output = BatchOutput(self._root / "out" / name)
        unknown = output.unknown_ids(contents.ids)
        if unknown:
            output.close(finished=False)
            raise BatchFault(f"out/{name} has answers to requests that are not in in/{name}, such as {unknown[0]!r}")
        return output

    def _refuse(self, source: Path, reason: str) -> None:
        assert self._root is not None
        log.warning("batch %r cannot be run: %s", source.name, reason)
        name = os.fsdecode(os.fsencode(source.name)[:MAX_NAME_BYTES])
        (self._root / "failed" / f"{name}.txt").write_text(f"{reason}\n", encoding="utf-8")
        source.replace(self._root / "failed" / source.name)

    def _purge(self) -> int:
        if self._root is None:
            return 0
        oldest = time.time() - self._keep
        running = set(self.waiting())
        old = [
            path
            for folder in FOLDERS[1:]
            for path in (self._root / folder).iterdir()
            if path.is_file() and path.stat().st_mtime < oldest and not _belongs_to(path.name, running)
        ]
        for path in old:
            path.unlink(missing_ok=True)
        return len(old)


def _fault_of(name: str) -> str:
    """Why a file of this name cannot be run, or ""."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "the name of the file is not UTF-8"
    return f"the name of the file must be at most {MAX_NAME_BYTES} bytes, got {size}" if size > MAX_NAME_BYTES else ""


def _belongs_to(name: str, inputs: set[str]) -> bool:
    """Whether the file holds answers, failures or the run id of a waiting input."""
    return any(name in (file, f"{file}.run", f"{file.removesuffix('.jsonl')}.errors.jsonl") for file in inputs)
