"""The shapes of batches and files, for /openapi.json."""

from typing import Literal

from ktqueue.openai.schema import Shape


class BatchError(Shape):
    """Why a batch failed. `line` of its input, from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Shape):
    """The first faults that were found in the input of a batch."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Shape):
    """Lines of a batch: all, those in the output file, and those in the error file."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(Shape):
    """Parts of the tokens of prompts."""

    cached_tokens: int


class OutputTokensDetails(Shape):
    """Parts of the tokens of answers."""

    reasoning_tokens: int


class BatchUsage(Shape):
    """Token counts of a batch, summed over the lines with an answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchProgress(Shape):
    """Speed of a batch that runs, the seconds that it still needs, and its requests that run or wait for a row.

    held_by: what keeps workers from more rows; `workers` if none serves the model. Null: not known.
    """

    tokens_per_second: float | None
    seconds_left: float | None
    running: int | None
    waiting: int | None
    held_by: str | None


class Batch(Shape):
    """A batch. Times in Unix seconds."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    progress: BatchProgress | None = None


class BatchList(Shape):
    """A page of batches, newest first."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class File(Shape):
    """A file. Times in Unix seconds."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(Shape):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Shape):
    """A file that was deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]
