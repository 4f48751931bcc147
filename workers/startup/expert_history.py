"""ExpertHistory: keeps how often each expert of a model was used, so that a worker's start knows the hottest.

There is a file for each digest of a model, in JSON: the uses by layer and expert. Workers add what they counted since
their last visit, so several may share the file. A file that cannot be read counts as none, and a folder that cannot be
written costs a warning.
"""

import fcntl
import logging
import math
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ktqueue.core.codec import CodecError, dumps, loads
from ktqueue.core.expert_work import ExpertUses, PlacesExperts
from ktqueue.core.settings.engine import EngineConfig
from ktqueue.core.thread_names import name_thread
from ktqueue.workers.startup.build import Built

VERSION = 1
OFF = "off"
SAVE_SECONDS = 600.0
CLOSE_SECONDS = 5.0
MOST_BYTES = 8 << 20  # of a file that is read
MOST_FILES = 64  # of a folder; those that were written longest ago are deleted
MOST_USES = 1 << 27  # of a layer. Beyond it older uses lose weight, so that a change of work shows within days
_WRAP = 1 << 32  # of the model's counts
_DIGEST = re.compile(r"[0-9a-f]{8,128}")

log = logging.getLogger(__name__)


class UsesFile:
    """The uses of one model in `folder`. shape: the number of experts of each layer."""

    def __init__(self, folder: Path, digest: str, shape: Sequence[int]) -> None:
        self._folder = folder
        self._shape = list(shape)
        self.path = folder / f"{digest}.json"

    def read(self) -> list[list[int]] | None:
        """The uses, or None if there is no file, or none that can be used."""
        try:
            with self.path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("uses of experts cannot be read: %s", error)
            return None
        uses = self._parse(data)
        if uses is None:
            log.warning("%s has no uses of this model's experts and is ignored", self.path)
        return uses

    def zeros(self) -> list[list[int]]:
        """No uses."""
        return [[0] * experts for experts in self._shape]

    def add(self, uses: ExpertUses) -> None:
        """Add uses to those in the file. Other processes may do so at the same time. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            before = self.read() or self.zeros()
            added = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(before, uses, strict=True)]
            self._replace(dumps({"v": VERSION, "uses": [_bounded(row) for row in added]}))
            self._delete_old_files()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _replace(self, data: bytes) -> None:
        """Write a whole file under another name first, so that a reader or a crash never meets a part of it."""
        part = self.path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)

    def _delete_old_files(self) -> None:
        files = [path for path in self._folder.glob("*.json") if _DIGEST.fullmatch(path.stem)]  # none of others
        files.sort(key=lambda path: path.stat().st_mtime)
        for path in files[:-MOST_FILES]:
            path.unlink(missing_ok=True)

    def _parse(self, data: bytes) -> list[list[int]] | None:
        if len(data) > MOST_BYTES:
            return None
        try:
            value = loads(data)
        except CodecError:
            return None
        uses = value.get("uses") if isinstance(value, dict) and value.get("v") == VERSION else None
        if not isinstance(uses, list) or not all(isinstance(row, list) for row in uses):
            return None
        if [len(row) for row in uses] != self._shape:
            return None
        numbers = (number for row in uses for number in row)
        return uses if all(type(number) is int and 0 <= number <= MOST_USES for number in numbers) else None


def _bounded(row: list[int]) -> list[int]:
    """The uses of a layer, scaled down if they are more than MOST_USES."""
    total = sum(row)
    return row if total <= MOST_USES else [math.floor(uses * MOST_USES / total) for uses in row]


class ExpertHistory:
    """Places the experts of `model` by the uses in `file`, and adds new uses every `save_seconds` and at the end."""

    def __init__(self, file: UsesFile, model: PlacesExperts, *, save_seconds: float = SAVE_SECONDS) -> None:
        self._file = file
        self._model = model
        self._save_seconds = save_seconds
        earlier = file.read()
        # Without any the first experts stay. Uses of steps that only warmed up the worker are forgotten.
        model.place_experts(earlier or file.zeros())
        if earlier is not None:
            log.info("experts are placed by their uses before this start (%s)", file.path)
        self._saved = model.expert_uses()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="experts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Add the last uses. A second call does nothing."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        name_thread("ktq-experts")
        while not self._stop.wait(self._save_seconds):
            self._save()
        self._save()

    def _save(self) -> None:
        uses = self._model.expert_uses()
        if uses is None or self._saved is None:
            return
        new = [[(b - a) % _WRAP for a, b in zip(*rows, strict=True)] for rows in zip(self._saved, uses, strict=True)]
        if not any(map(any, new)):
            return
        try:
            self._file.add(new)
            self._saved = uses
        except OSError as error:
            log.warning("uses of experts are not kept for the next start: %s", error)


def start_expert_history(config: EngineConfig, built: Built) -> ExpertHistory | None:
    """Begin with the experts that earlier workers of the model used most; None if nothing depends on that."""
    model, digest = built.model.module, built.card.digest
    if not isinstance(model, PlacesExperts) or not model.depends_on_uses:
        return None
    uses = model.expert_uses()
    assert uses is not None
    file = UsesFile(_folder(config), digest, [len(layer) for layer in uses])
    if config.expert_uses_dir == OFF or not _DIGEST.fullmatch(digest):
        model.place_experts(file.zeros())  # as in ExpertHistory
        return None
    return ExpertHistory(file, model)


def _folder(config: EngineConfig) -> Path:
    """The folder of the files."""
    if config.expert_uses_dir is not None:
        return Path(config.expert_uses_dir)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "ktqueue" / "experts"
