"""A batch from standard input: kept in a file beside the output until the batch is finished.

A batch is read twice, to be checked and to be run, and once more when it goes on after an interruption.
"""

import filecmp
from pathlib import Path
from typing import BinaryIO

from ktqueue.batches.faults import BatchFault
from ktqueue.batches.output import OutputPaths, RecordFile

MAX_BYTES = 4 << 30
PIECE_BYTES = 1 << 20


def spool_path(target: Path) -> Path:
    """Where the input of the output `target` is kept."""
    return target.with_name(f"{target.name}.in")


def spool(stream: BinaryIO, target: Path, *, overwrite: bool) -> Path:
    """Copy the stream to a file for the output `target`, and give its path.

    An output that is unfinished goes on only with the input that it began with, and a finished one only by
    `overwrite`: answers are known by the numbers of lines. Raises BatchFault, OSError.
    """
    RecordFile(target, mend=False).close(remove_if_empty=True)  # another run may be reading what is kept
    path = spool_path(target)
    draft = path.with_name(f"{path.name}.new")
    try:
        _copy(stream, draft)
        if not overwrite:
            _check_same(draft, path, target)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return path


def _copy(stream: BinaryIO, path: Path) -> None:
    size = 0
    with path.open("wb") as file:
        while piece := stream.read(PIECE_BYTES):
            size += len(piece)
            if size > MAX_BYTES:
                raise BatchFault(f"standard input is longer than {MAX_BYTES >> 30} GiB: give a file")
            file.write(piece)


def _check_same(draft: Path, path: Path, target: Path) -> None:
    if path.exists():
        if not filecmp.cmp(draft, path, shallow=False):
            raise BatchFault(
                f"{path} holds another input, whose run is not finished: finish it with "
                f"`ktqueue batch run {path} -o {target}`, choose another output, or --overwrite"
            )
    elif any(one.exists() and one.stat().st_size for one in (target, OutputPaths.of(target).failures)):
        raise BatchFault(
            f"{target} has the answers of an earlier run: with standard input choose another output, or --overwrite"
        )
