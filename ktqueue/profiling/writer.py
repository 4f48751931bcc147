"""RecordWriter: a thread that writes records to files, so that the work which they describe never waits for a disk.

A file is NAME.KIND.NUMBER.jsonl, where NAME has the time of the start and the id of the process. Its first line says
what the process is. A full file is followed by another, and the oldest is deleted once there are too many. If records
come faster than they can be written, they are dropped and counted: a line {"dropped": N} has the total.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Protocol

from ktqueue.core.codec import dumps
from ktqueue.core.errors import ConfigError
from ktqueue.core.settings.profile import ProfileConfig
from ktqueue.core.thread_names import name_thread
from ktqueue.profiling.records import VERSION

PAUSE_SECONDS = 0.2  # between two visits of the thread; a process that is killed loses what came since
RECORDS_AT_ONCE = 8  # between two of which other threads may run
MOST_HELD = 100_000  # lines that wait to be written
CLOSE_SECONDS = 5.0

log = logging.getLogger(__name__)


class Lines(Protocol):
    """Something that becomes JSON lines."""

    def lines(self, wall: float) -> bytes:
        """Its lines. `wall`: Unix seconds minus the monotonic clock."""


class _Files:
    """The files of one kind of this process."""

    def __init__(self, folder: Path, name: str, kind: str, config: ProfileConfig, head: Mapping[str, Any]) -> None:
        self._folder, self._name, self._kind = folder, name, kind
        self._config = config
        self._head = dumps({"v": VERSION, "kind": kind, **head}) + b"\n"
        self._number = 0
        self._kept: deque[Path] = deque()
        self._file: BinaryIO | None = None
        self._size = 0

    def write(self, data: bytes) -> None:
        if self._file is not None and self._size + len(data) > self._config.file_bytes:
            self.close()
        if self._file is None:
            self._begin()
        assert self._file is not None
        self._file.write(data)
        self._size += len(data)

    def _begin(self) -> None:
        self._number += 1
        path = self._folder / f"{self._name}.{self._kind}.{self._number:04d}.jsonl"
        self._file = path.open("xb")
        self._file.write(self._head)
        self._size = len(self._head)
        self._kept.append(path)
        if len(self._kept) > self._config.files:
            self._kept.popleft().unlink(missing_ok=True)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file. Another call does nothing, also if this one raises OSError."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def prepare_folder(config: ProfileConfig) -> None:
    """Create the folder of profiles, if one is set. Call it before a model is loaded, which may take minutes.

    Raises ConfigError if it cannot be written. A full disk is no error, since profiles must not end the work.
    """
    if config.folder is None:
        return
    folder = Path(config.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            return
        reason = f"profile.folder {config.folder!r} cannot be written: {error.strerror}"
        raise ConfigError(reason, param="profile.folder", value=config.folder) from error


class RecordWriter:
    """Writes records to `config.folder`. `head`: facts of this process, for the first line of each file.

    Make it in the process that uses it: a fork has no threads. Raises ConfigError if the folder cannot be written.
    """

    def __init__(self, config: ProfileConfig, head: Mapping[str, Any], *, most_held: int = MOST_HELD) -> None:
        assert config.folder is not None
        started = time.time()
        self._config = config
        self._folder = Path(config.folder)
        self._head = {"pid": os.getpid(), "host": os.uname().nodename, "started": started, **head}
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
        host = os.uname().nodename.partition(".")[0]  # a folder may be shared by machines
        self._name = f"{stamp}-{int(started % 1 * 1e6):06d}-{host}-{os.getpid()}"
        self._files: dict[str, _Files] = {}
        self._steps: deque[Lines] = deque()
        self._held: list[tuple[str, Lines]] = []
        self._held_lines = 0
        self._most_held = most_held
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._dropped = self._dropped_steps = 0
        self._reported = 0
        self._failed = False  # the last time, so that a full disk is logged once
        prepare_folder(config)
        try:
            self._write("process", dumps({"at": self._head["started"]}) + b"\n")
            self._flush()
        except OSError as error:
            self._warn(error)
        self._thread = threading.Thread(target=self._run, name="profile", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written, because too many were waiting or the disk was full."""
        return self._dropped + self._dropped_steps

    def put_step(self, record: Lines) -> None:
        """Queue the record of a step, a single line. One thread may do this, which then needs no lock."""
        if len(self._steps) < self._most_held:
            self._steps.append(record)
        else:
            self._dropped_steps += 1

    def put(self, kind: str, record: Lines, lines: int = 1) -> None:
        """Queue a record of so many lines. Never waits for the disk."""
        with self._lock:
            if self._held_lines + lines > self._most_held:
                self._dropped += lines
                return
            self._held.append((kind, record))
            self._held_lines += lines

    def close(self) -> None:
        """Write what is queued and close the files. A second call does nothing."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        name_thread("ktq-profile")
        while not self._stop.wait(PAUSE_SECONDS):
            self._write_held()
        self._write_held()
        for files in self._files.values():
            with suppress(OSError):  # the disk is full, which `_write_held` has said
                files.close()

    def _write_held(self) -> None:
        with self._lock:
            held, self._held, self._held_lines = self._held, [], 0
        held += [("steps", self._steps.popleft()) for _ in range(len(self._steps))]
        wall = time.time() - time.monotonic()
        try:
            for place, (kind, record) in enumerate(held):
                self._write(kind, record.lines(wall))
                if place % RECORDS_AT_ONCE == 0:
                    time.sleep(0)  # lets a thread go on that waits for the interpreter
            if (dropped := self.dropped) != self._reported:
                self._write("process", dumps({"at": time.time(), "dropped": dropped}) + b"\n")
            self._flush()
            self._reported, self._failed = dropped, False
        except OSError as error:  # the disk is full: profiles must not end the work
            self._warn(error)
            with self._lock:
                self._dropped += len(held)

    def _warn(self, error: OSError) -> None:
        if not self._failed:
            log.warning("lines of the profile are dropped: %s: %s", self._folder, error.strerror)
        self._failed = True

    def _write(self, kind: str, data: bytes) -> None:
        files = self._files.get(kind)
        if files is None:
            files = self._files[kind] = _Files(self._folder, self._name, kind, self._config, self._head)
        files.write(data)

    def _flush(self) -> None:
        for files in self._files.values():
            files.flush()
