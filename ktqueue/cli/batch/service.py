"""Batches and their files on a server with OpenAI's API: our gateway, or another one.

Source of paths, fields and statuses: OpenAI's API reference, Batch and Files.
"""

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from ktqueue.cli.http_client import answered, check, connect
from ktqueue.core.codec import Json
from ktqueue.core.errors import InvalidRequest, KtqueueError

Progress = Callable[[int, int | None], None]
"""Takes the bytes that are done, and all of them if they are known."""
PAGE = 100  # batches of one list
ENDED = ("completed", "failed", "expired", "cancelled")
"""Statuses in which a batch stays."""


class BatchService:
    """The batches of one key on one server, used as a context manager.

    All methods raise Unavailable if the server does not answer, and KtqueueError with its reason if it refuses.
    """

    def __init__(self, base_url: str, api_key: str | None) -> None:
        """`base_url` is that of the openai client, with or without /v1."""
        self._client = connect(base_url, api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def upload(self, path: Path, progress: Progress) -> str:
        """Store an input file and return its id. The file is read while it is sent. Raises OSError."""
        with _Counted(path, progress) as file:
            name = path.name.encode(errors="replace").decode()  # it may be no UTF-8
            files = {"file": (name, file, "application/jsonl")}
            return str(self._ask("POST", "/v1/files", data={"purpose": "batch"}, files=files)["id"])

    def delete_file(self, file_id: str) -> None:
        """Delete a stored file."""
        self._ask("DELETE", _path("files", file_id))

    def create(self, file_id: str, endpoint: str, window: str, metadata: Mapping[str, str]) -> Json:
        """Create a batch of a stored file, and return it."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return self._ask("POST", "/v1/batches", json=body | ({"metadata": dict(metadata)} if metadata else {}))

    def batch(self, batch_id: str) -> Json:
        """Return a batch."""
        return self._ask("GET", _path("batches", batch_id))

    def cancel(self, batch_id: str) -> Json:
        """Cancel a batch and return it. It keeps what is done."""
        return self._ask("POST", f"{_path('batches', batch_id)}/cancel")

    def batches(self, limit: int) -> list[Json]:
        """Return the newest batches, at most `limit`, newest first."""
        found: list[Json] = []
        more = True
        while more and len(found) < limit:
            parameters = {"limit": str(min(PAGE, limit - len(found)))}
            parameters |= {"after": found[-1]["id"]} if found else {}
            page = self._ask("GET", "/v1/batches", needs="data", params=parameters)
            found += page["data"]
            more = bool(page["data"]) and bool(page.get("has_more"))
        return found[:limit]

    @contextmanager
    def content(self, file_id: str) -> Iterator[tuple[Iterator[bytes], int | None]]:
        """Open a stored file: its bytes in parts, and their number if the server says it."""
        stream = self._client.stream("GET", f"{_path('files', file_id)}/content")
        with answered(self._client), stream as response:
            if response.is_error:
                response.read()
            check(response)
            stated = response.headers.get("content-length", "")
            encoded = "content-encoding" in response.headers
            yield response.iter_bytes(), int(stated) if stated.isdecimal() and not encoded else None

    def _ask(self, method: str, path: str, *, needs: str = "id", **options: Any) -> Json:
        """Send a request and return the object in its answer, which has the key `needs`."""
        with answered(self._client):
            response = self._client.request(method, path, **options)
        check(response)
        try:
            document = response.json()
        except ValueError as error:
            raise KtqueueError(f"{self._client.base_url}: the answer to {method} {path} is not JSON") from error
        if not isinstance(document, dict) or needs not in document:
            raise KtqueueError(f"{self._client.base_url}: the answer to {method} {path} has no {needs}")
        return document


def _path(kind: str, name: str) -> str:
    if not name:
        raise InvalidRequest("ID must not be empty")
    return f"/v1/{kind}/{quote(name, safe='')}"


class _Counted(io.FileIO):
    """A file that is being sent, and the progress of that."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(path)
        self._progress = progress

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes."""
        data = super().read(-1 if size is None else size)
        self._progress(self.tell(), os.fstat(self.fileno()).st_size)
        return data
