"""The log files of supervised processes: opened private, kept to a size. Knows nothing of what is in them."""

import logging
import os
import shutil
from pathlib import Path

from ktqueue.broker.redis.state_folder import PRIVATE_FILE

CHECK_SECONDS = 1.0  # how often `rotate_all` should be called
LONGEST_COPY = 2  # times the limit: so much is kept of what a file holds when it is found too large

log = logging.getLogger(__name__)


def begin_log(path: Path) -> None:
    """A new file for a new run; that of the run before is kept as NAME.log.1."""
    if path.exists():
        path.replace(older(path))
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))


def older(path: Path) -> Path:
    """Where the older part of a log is kept."""
    return path.with_name(f"{path.name}.1")


def rotate_all(folder: Path, max_bytes: int) -> None:
    """Keep each log of the folder to that size, roughly: a log is looked at now and then."""
    for path in folder.glob("*.log"):
        try:
            rotate(path, max_bytes)
        except OSError as error:
            log.warning("%s is not kept short: %s", path, error)


def rotate(path: Path, max_bytes: int) -> None:
    """Where the file is larger than that, keep what it holds as NAME.log.1 and empty it.

    It is emptied and not moved, for processes that nobody could ask hold it open: they append, so they go on at its
    beginning. Where there is no room for a copy, what it holds is lost: a full disk is worse than a short log.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "r+b") as source:
        kept = older(path)
        draft = kept.with_name(f"{kept.name}.new")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE), "wb") as target:
                surplus = os.fstat(source.fileno()).st_size - LONGEST_COPY * max_bytes
                if surplus > 0:  # it grew far beyond the limit since the last look
                    source.seek(surplus)
                    source.readline(max_bytes)  # what is left of a line
                shutil.copyfileobj(source, target)
            draft.replace(kept)
        except OSError as error:
            draft.unlink(missing_ok=True)
            log.warning("%s is emptied without a copy: %s", path, error.strerror)
        source.truncate(0)
