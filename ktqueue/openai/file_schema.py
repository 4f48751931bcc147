"""The shapes of files, for /openapi.json."""

from typing import Literal

from ktqueue.openai.schema import Shape


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
