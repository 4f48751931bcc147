"""/v1/files: the fields of an upload, and the file object. Source: OpenAI's API reference, Files."""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ktqueue.broker.files import FileRecord
from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest
from ktqueue.openai.validation import parse

SHORTEST_LIFE, LONGEST_LIFE = 3_600, 2_592_000  # seconds
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"  # as clients write them in a form


class UploadFields(BaseModel):
    """The fields of an upload besides its file. Numbers of a form are text."""

    model_config = ConfigDict(extra="forbid")

    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: int | None = Field(None, ge=SHORTEST_LIFE, le=LONGEST_LIFE, alias="expires_after[seconds]")


def parse_upload(fields: Mapping[str, str]) -> UploadFields:
    """The fields of a form. Raises InvalidRequest."""
    if "expires_after" in fields:
        limit = f"sent as {ANCHOR} and {SECONDS}"
        raise InvalidRequest(f"expires_after must be {limit}", param="expires_after", limit=limit)
    body = parse(UploadFields, fields)
    if (body.anchor is None) != (body.seconds is None):
        missing = ANCHOR if body.anchor is None else SECONDS
        raise InvalidRequest(f"{missing} must be present if the other is", param=missing)
    return body


def file_json(record: FileRecord) -> Json:
    """The file object."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.size,
        "created_at": int(record.created_at),
        "expires_at": int(record.expires_at),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }
