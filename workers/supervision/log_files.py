"""The log files of supervised processes: private, and limited in size. Knows nothing of their content."""

import logging
import os
import shutil
from pathlib import Path

from ktqueue.broker.redis.state_folder import PRIVATE_FILE

CHECK_SECONDS = 1.0  # time between two calls of `rotate_all`
LONGEST_COPY = 2  # times the size limit: the largest copy that is kept of a file that is too long

log = logging.getLogger(__name__)


def begin_log(path: Path) -> None:
    """Create an empty log for a new run. The log of the previous run becomes NAME.log.1."""
    if path.exists():
        path.replace(older(path))
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))


def older(path: Path) -> Path:
    """The path of the older part of a log."""
    return path.with_name(f"{path.name}.1")


def rotate_all(folder: Path, max_bytes: int) -> None:
    """Limit each log of the folder to about `max_bytes`. Between two calls a log may grow beyond that."""
    for path in folder.glob("*.log"):
        try:
            rotate(path, max_bytes)
        except OSError as error:
            log.warning("%s cannot be shortened: %s", path, error)


def rotate(path: Path, max_bytes: int) -> None:
    """If the file is larger than `max_bytes`, copy it to NAME.log.1 and empty it.

    It is emptied instead of moved, because processes hold it open and cannot be asked to open another. They append, so
    they continue at its beginning. If the disk has no room for a copy, the content is lost.
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
                if surplus > 0:  # it grew far beyond the limit since the last check
                    source.seek(surplus)
                    source.readline(max_bytes)  # the rest of a line that is cut
                shutil.copyfileobj(source, target)
            draft.replace(kept)
        except OSError as error:
            draft.unlink(missing_ok=True)
            log.warning("%s was emptied without a copy: %s", path, error.strerror)
        source.truncate(0)
