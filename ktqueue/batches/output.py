"""The output of a batch: OpenAI batch output lines, appended as answers come, and what a later run finds of them.

`OUT.jsonl` gets the answers, `OUT.errors.jsonl` the failures, `OUT.jsonl.run` the name of the run while it is not
finished: job ids are made from it, so that a run that was killed finds its jobs again. One process at a time may
hold an output (flock). A record is one write of one line; a torn last line is cut off when the file is opened.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktqueue.batches.faults import BatchFault, OutputLocked
from ktqueue.batches.id_set import IdSet
from ktqueue.core.codec import CodecError, dumps, loads

SYNC_SECONDS = 1.0
RUN_NAME_BYTES = 4
_TAIL_BYTES = 1 << 16
_RECORD_START = b'{"id":"batch_req_'  # how each of our lines begins: nothing else is ever cut off


class RecordFile:
    """One append-only file of JSON lines, each with a custom_id."""

    def __init__(self, path: Path, *, mend: bool = True) -> None:
        """Open or make the file, lock it and mend its end. Raises BatchFault, OSError."""
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._handle)
            raise OutputLocked(f"{path}: another batch run is writing to it") from error
        self._synced = time.monotonic()
        try:
            if mend:
                self._mend()
        except BatchFault:
            os.close(self._handle)
            raise

    def records(self) -> Iterator[dict[str, Any]]:
        """What the file holds. Raises BatchFault naming the line that is no batch output line."""
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                try:
                    value = loads(raw)
                except CodecError as error:
                    raise BatchFault(f"{self.path}:{number}: {error.message} (--overwrite starts anew)") from error
                if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
                    raise BatchFault(f"{self.path}:{number}: not a batch output line (--overwrite starts anew)")
                yield value

    def append(self, record: dict[str, Any]) -> None:
        """Write one line at once, whole or not at all; the disk has it within a second or so. Raises OSError."""
        data = memoryview(dumps(record) + b"\n")
        before = os.fstat(self._handle).st_size
        try:
            while data:
                data = data[os.write(self._handle, data) :]
            now = time.monotonic()
            if now - self._synced > SYNC_SECONDS:
                os.fdatasync(self._handle)
                self._synced = now
        except OSError as error:  # the disk is full: others may append before the run has ended
            os.ftruncate(self._handle, before)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def clear(self) -> None:
        """Forget every line."""
        os.ftruncate(self._handle, 0)

    def close(self, *, remove_if_empty: bool = False) -> None:
        """Sync, unlock and close."""
        os.fdatasync(self._handle)
        if remove_if_empty and not os.fstat(self._handle).st_size:
            self.path.unlink()
        os.close(self._handle)

    def _mend(self) -> None:
        """Cut a torn last line; end a whole one that only lacks its newline."""
        size = end = os.fstat(self._handle).st_size
        tail = b""
        while end and b"\n" not in tail:
            start = max(0, end - _TAIL_BYTES)
            tail = os.pread(self._handle, end - start, start) + tail
            end = start
        torn = tail[tail.rfind(b"\n") + 1 :]
        if not torn:
            return
        try:
            loads(torn)
        except CodecError:
            if not torn.startswith(_RECORD_START[: len(torn)]):
                raise BatchFault(f"{self.path}: not a batch output (--overwrite starts anew)") from None
            os.ftruncate(self._handle, size - len(torn))
        else:
            os.write(self._handle, b"\n")


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """Where a batch writes: answers, failures, the run's name, and a draft of that."""

    answers: Path
    failures: Path
    run: Path
    draft: Path

    @classmethod
    def of(cls, path: Path) -> "OutputPaths":
        """The files of the output `path`."""
        return cls(
            answers=path,
            failures=path.with_name(f"{path.stem}.errors{path.suffix or '.jsonl'}"),
            run=path.with_name(f"{path.name}.run"),
            draft=path.with_name(f"{path.name}.run.new"),
        )

    def check_spare(self, source: Path) -> None:
        """Raises BatchFault where one of them is the input: it would be lost."""
        for path in (self.answers, self.failures, self.run, self.draft):
            if path.exists() and path.samefile(source):
                raise BatchFault(f"{path}: is the input, and would be written to: choose another output")


class BatchOutput:
    """The files of one batch. `answered` and `failed` count what they hold, of earlier runs too."""

    def __init__(self, path: Path, *, overwrite: bool = False, retry_failed: bool = False) -> None:
        """Open the files and read which custom_ids they hold. Raises BatchFault, OSError."""
        self._paths = OutputPaths.of(path)
        self.error_path = self._paths.failures
        self._answers = RecordFile(path, mend=not overwrite)
        try:
            self._errors = RecordFile(self.error_path, mend=not overwrite)
        except BaseException:
            self._answers.close()
            raise
        self.ids = IdSet()
        self.answered = self.failed = 0
        try:
            if overwrite or retry_failed:
                self.run = self._fresh_run()  # before anything is forgotten: old job ids must not be found again
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

    def strangers(self, expected: IdSet) -> list[str]:
        """Some custom_ids of the output that the input does not have."""
        found: list[str] = []
        for file in (self._answers, self._errors):
            for record in file.records():
                if record["custom_id"] not in expected:
                    found.append(record["custom_id"])
                    if len(found) == 3:
                        return found
        return found

    def answer(self, record: dict[str, Any]) -> None:
        """Add an answer, once for each custom_id."""
        if record["custom_id"] not in self.ids:
            self._answers.append(record)
            self.ids.add(record["custom_id"])
            self.answered += 1

    def fail(self, record: dict[str, Any]) -> None:
        """Add a failure, once for each custom_id."""
        if record["custom_id"] not in self.ids:
            self._errors.append(record)
            self.ids.add(record["custom_id"])
            self.failed += 1

    def close(self, *, finished: bool) -> None:
        """Close the files. A finished batch needs its run's name no more."""
        if finished:
            self._paths.run.unlink(missing_ok=True)
        self._answers.close()
        self._errors.close(remove_if_empty=True)

    def _known_run(self) -> str | None:
        """The name of the run that was interrupted here."""
        try:
            return str(loads(self._paths.run.read_bytes())["run"])
        except FileNotFoundError:
            return None
        except (CodecError, TypeError, KeyError) as error:
            raise BatchFault(f"{self._paths.run}: not a batch run's name (delete it to start anew)") from error

    def _fresh_run(self) -> str:
        run = secrets.token_hex(RUN_NAME_BYTES)
        with self._paths.draft.open("wb") as file:
            file.write(dumps({"run": run}))
            file.flush()
            os.fsync(file.fileno())
        self._paths.draft.replace(self._paths.run)
        return run
