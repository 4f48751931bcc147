"""The output of a batch: OpenAI's batch output lines, appended as answers arrive, and read again by a later run.

`OUT.jsonl` gets the answers and `OUT.errors.jsonl` the failures. `OUT.jsonl.run` has the name of the run until it is
finished: job ids are made from it, so that a killed run finds its jobs again. Only one process at a time can use an
output (flock). Each record is one write of one line, and opening a file cuts off an incomplete last line.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktqueue.batches.errors import BatchFault, OutputLocked
from ktqueue.batches.id_set import IdSet
from ktqueue.core.codec import CodecError, dumps, dumps_line, loads

SYNC_SECONDS = 1.0
RUN_NAME_BYTES = 4
_TAIL_BYTES = 1 << 16
_RECORD_START = b'{"id":"batch_req_'  # the beginning of each of our lines; no other line is cut off


class RecordFile:
    """An append-only file of JSON lines, each with a custom_id."""

    def __init__(self, path: Path, *, repair: bool = True) -> None:
        """Open or create the file, lock it, and repair its last line if `repair`. Raises BatchFault, OSError."""
        self.path = path
        if path.exists() and not path.is_file() and not path.is_dir():  # it could not be read again
            raise BatchFault(f"{path}: a batch needs a file as output, not a pipe or a device")
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._handle)
            raise OutputLocked(f"{path}: another batch run is writing to it") from error
        self._synced = time.monotonic()
        try:
            if repair:
                self._repair()
        except BatchFault:
            os.close(self._handle)
            raise

    def records(self) -> Iterator[dict[str, Any]]:
        """The records of the file. Raises BatchFault naming a line that is not a batch output line."""
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                try:
                    value = loads(raw)
                except CodecError as error:
                    raise BatchFault(f"{self.path}:{number}: {error.message} (--overwrite starts again)") from error
                if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
                    raise BatchFault(f"{self.path}:{number}: not a batch output line (--overwrite starts again)")
                yield value

    def append(self, record: dict[str, Any]) -> None:
        """Write one line, completely or not at all. It is on disk within about a second. Raises OSError."""
        data = memoryview(dumps_line(record))
        before = os.fstat(self._handle).st_size
        try:
            while data:
                data = data[os.write(self._handle, data) :]
            now = time.monotonic()
            if now - self._synced > SYNC_SECONDS:
                os.fdatasync(self._handle)
                self._synced = now
        except OSError as error:  # such as a full disk: other lines may still be appended later
            os.ftruncate(self._handle, before)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def clear(self) -> None:
        """Delete every line."""
        os.ftruncate(self._handle, 0)

    def close(self, *, remove_if_empty: bool = False) -> None:
        """Sync, unlock and close."""
        os.fdatasync(self._handle)
        if remove_if_empty and not os.fstat(self._handle).st_size:
            self.path.unlink()
        os.close(self._handle)

    def _repair(self) -> None:
        """Cut off an incomplete last line, and end a complete one that lacks its newline."""
        size = end = os.fstat(self._handle).st_size
        tail = b""
        while end and b"\n" not in tail:
            start = max(0, end - _TAIL_BYTES)
            tail = os.pread(self._handle, end - start, start) + tail
            end = start
        last_line = tail[tail.rfind(b"\n") + 1 :]
        if not last_line:
            return
        try:
            loads(last_line)
        except CodecError:
            if not last_line.startswith(_RECORD_START[: len(last_line)]):
                raise BatchFault(f"{self.path}: not a batch output (--overwrite starts again)") from None
            os.ftruncate(self._handle, size - len(last_line))
        else:
            os.write(self._handle, b"\n")


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """The files that a batch writes: answers, failures, the run's name, and its draft before a rename."""

    answers: Path
    failures: Path
    run: Path
    draft: Path

    @classmethod
    def of(cls, path: Path) -> "OutputPaths":
        """The files of the output `path`. Raises BatchFault for `-`: two kinds of lines fit in no single stream."""
        if str(path) == "-":
            raise BatchFault("a batch needs a file as output, got -: failed lines go to another file beside it")
        return cls(
            answers=path,
            failures=path.with_name(f"{path.stem}.errors{path.suffix or '.jsonl'}"),
            run=path.with_name(f"{path.name}.run"),
            draft=path.with_name(f"{path.name}.run.new"),
        )

    def check_differs_from(self, source: Path) -> None:
        """Raise BatchFault if one of them is the input, which would be overwritten."""
        for path in (self.answers, self.failures, self.run, self.draft):
            if path.exists() and path.samefile(source):
                raise BatchFault(f"{path}: the output would overwrite the input; choose another output")


class BatchOutput:
    """The files of one batch. `answered` and `failed` count their records, those of earlier runs included."""

    def __init__(self, path: Path, *, overwrite: bool = False, retry_failed: bool = False) -> None:
        """Open the files and read which custom_ids they hold. Raises BatchFault, OSError."""
        self._paths = OutputPaths.of(path)
        self.error_path = self._paths.failures
        self._answers = RecordFile(path, repair=not overwrite)
        try:
            self._errors = RecordFile(self.error_path, repair=not overwrite)
        except BaseException:
            self._answers.close()
            raise
        self.ids = IdSet()
        self.answered = self.failed = 0
        try:
            if overwrite or retry_failed:
                self.run = self._fresh_run()  # before records are deleted: the old job ids must not be found again
                self._errors.clear()
            if overwrite:
                self._answers.clear()
            for record in self._answers.records():
                self.answered += self.ids.add(record["custom_id"])
            for record in self._errors.records():
                self.failed += self.ids.add(record["custom_id"])
            if not (overwrite or retry_failed):
                self.run = self._known_run() or self._fresh_run()
        except BaseException:
            self.close(finished=False)
            raise

    def unknown_ids(self, expected: IdSet) -> list[str]:
        """Up to three custom_ids of the output that are not in `expected`."""
        found: list[str] = []
        for file in (self._answers, self._errors):
            for record in file.records():
                if record["custom_id"] not in expected:
                    found.append(record["custom_id"])
                    if len(found) == 3:
                        return found
        return found

    def answer(self, record: dict[str, Any]) -> None:
        """Append an answer, unless its custom_id has a record already."""
        if record["custom_id"] not in self.ids:
            self._answers.append(record)
            self.ids.add(record["custom_id"])
            self.answered += 1

    def fail(self, record: dict[str, Any]) -> None:
        """Append a failure, unless its custom_id has a record already."""
        if record["custom_id"] not in self.ids:
            self._errors.append(record)
            self.ids.add(record["custom_id"])
            self.failed += 1

    def close(self, *, finished: bool) -> None:
        """Close the files. If the batch is finished, delete the name of its run."""
        if finished:
            self._paths.run.unlink(missing_ok=True)
        self._answers.close()
        self._errors.close(remove_if_empty=True)

    def _known_run(self) -> str | None:
        """The name of the interrupted run, if there is one."""
        try:
            return str(loads(self._paths.run.read_bytes())["run"])
        except FileNotFoundError:
            return None
        except (CodecError, TypeError, KeyError) as error:
            raise BatchFault(
                f"{self._paths.run}: not the name of a batch run (delete the file to start again)"
            ) from error

    def _fresh_run(self) -> str:
        run = secrets.token_hex(RUN_NAME_BYTES)
        with self._paths.draft.open("wb") as file:
            file.write(dumps({"run": run}))
            file.flush()
            os.fsync(file.fileno())
        self._paths.draft.replace(self._paths.run)
        return run
