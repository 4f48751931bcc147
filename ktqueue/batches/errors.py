"""Errors in the files of a batch."""

from ktqueue.core.errors import InvalidRequest


class BatchFault(InvalidRequest):
    """An input, a line of it, or an output cannot be used; the message names file and line."""


class OutputLocked(BatchFault):
    """Another run is writing to the output."""
