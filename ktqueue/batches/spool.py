"""A batch from standard input: kept in a file beside the output until the batch is finished.

A batch is read twice, first to check it and then to run it, and again when it is resumed after an interruption.
"""

import filecmp
from pathlib import Path
from typing import BinaryIO

from ktqueue.batches.errors import BatchFault
from ktqueue.batches.output import OutputPaths, RecordFile
from ktqueue.core.units import format_bytes

MAX_BYTES = 4 << 30
PIECE_BYTES = 1 << 20


def spool_path(target: Path) -> Path:
    """The file that keeps the input of the output `target`."""
    return target.with_name(f"{target.name}.in")


def spool(stream: BinaryIO, target: Path, *, overwrite: bool, max_bytes: int = MAX_BYTES) -> Path:
    """Copy the stream to the input file of the output `target`, and return its path.

    An unfinished output can be resumed only with the same input, and a finished one only overwritten, because line
    numbers name the answers. At most `max_bytes` are copied. Raises BatchFault, OSError.
    """
    RecordFile(target, repair=False).close(remove_if_empty=True)  # fails while another run uses the output
    path = spool_path(target)
    draft = path.with_name(f"{path.name}.new")
    try:
        _copy(stream, draft, max_bytes)
        if not overwrite:
            _check_same(draft, path, target)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return path


def _copy(stream: BinaryIO, path: Path, max_bytes: int) -> None:
    size = 0
    with path.open("wb") as file:
        while piece := stream.read(PIECE_BYTES):
            size += len(piece)
            if size > max_bytes:
                raise BatchFault(f"standard input is longer than {format_bytes(max_bytes)}: use a file instead")
            file.write(piece)


def _check_same(draft: Path, path: Path, target: Path) -> None:
    if path.exists():
        if not filecmp.cmp(draft, path, shallow=False):
            raise BatchFault(
                f"{path} has another input, whose run is not finished: finish it with "
                f"`ktqueue batch run {path} -o {target}`, choose another output, or --overwrite"
            )
    elif any(path.exists() and path.stat().st_size for path in (target, OutputPaths.of(target).failures)):
        raise BatchFault(
            f"{target} has the answers of an earlier run: with standard input choose another output, or --overwrite"
        )
