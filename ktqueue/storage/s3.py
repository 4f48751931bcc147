"""A store in a bucket of S3, or of a server that speaks its protocol. Keys and address come from AWS's own variables.

A small object is one request. A larger one is a multipart upload, which appears when it is completed. `sweep` aborts
uploads that were begun a day ago, since their writers have died.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import md5
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from ktqueue.core.errors import Unavailable
from ktqueue.storage.store import PART_BYTES, THREADS, NotStored, Store, check_name, check_prefix, is_name

UPLOAD_BYTES = 5 << 20  # of a part of a multipart upload: the least that S3 allows
GET, ABORT, COMPLETE = "get_object", "abort_multipart_upload", "complete_multipart_upload"
ABANDONED = timedelta(days=1)
_MISSING = {"NoSuchKey", "NotFound", "404"}
_PAST_THE_END = {"InvalidRange", "416"}
_BEYOND_ASCII = re.compile(r"[^ -~]+")

Result = TypeVar("Result")


class S3Store(Store):
    """The objects of a bucket whose keys begin with `prefix`, which ends with / or is empty."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        self._client: Any = boto3.session.Session().client(
            "s3",
            config=Config(
                connect_timeout=5,
                read_timeout=30,
                retries={"mode": "standard", "max_attempts": 3},
                max_pool_connections=2 * THREADS,
                request_checksum_calculation="when_required",  # other servers may not know the newer ones
                response_checksum_validation="when_required",
            ),
        )

    @asynccontextmanager
    async def create(self, name: str) -> AsyncIterator["S3Writing"]:
        writing = S3Writing(self, check_name(name))
        try:
            yield writing
            await writing.complete()
        except BaseException:
            await asyncio.shield(writing.abort())
            raise

    async def read(self, name: str, start: int = 0, length: int | None = None) -> AsyncGenerator[bytes, None]:
        if length == 0:
            return
        end = "" if length is None else start + length - 1
        try:
            data, body = await self._call(GET, check_name(name), Range=f"bytes={start}-{end}")
        except _PastTheEnd:
            return
        try:
            while data:
                yield data
                data = await self._run(body.read, PART_BYTES)
        finally:
            body.close()

    async def size(self, name: str) -> int:
        return int((await self._call("head_object", check_name(name)))["ContentLength"])

    async def age(self, name: str) -> float:
        facts = await self._call("head_object", check_name(name))
        seconds: float = (_time_of(facts) - facts["LastModified"]).total_seconds()
        return seconds

    async def delete(self, name: str) -> None:
        with suppress(NotStored):  # from some servers, not from AWS
            await self._call("delete_object", check_name(name))

    async def names(self, prefix: str) -> list[str]:
        found: list[str] = []
        more: dict[str, Any] = {}
        while True:
            page = await self._call("list_objects_v2", Prefix=self._prefix + check_prefix(prefix), **more)
            found += [entry["Key"].removeprefix(self._prefix) for entry in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return sorted(filter(is_name, found))
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def sweep(self) -> None:
        more: dict[str, Any] = {}
        while True:
            page = await self._call("list_multipart_uploads", Prefix=self._prefix, **more)
            for upload in page.get("Uploads", ()):
                if _time_of(page) - upload["Initiated"] > ABANDONED:
                    key, upload_id = upload["Key"].removeprefix(self._prefix), upload["UploadId"]
                    with suppress(NotStored):  # somebody else has just ended it
                        await self._call(ABORT, key, UploadId=upload_id)
            if not page.get("IsTruncated"):
                return
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _get(self, **arguments: Any) -> tuple[bytes, Any]:
        """The first part of an object, and the rest. So one that is small has its connection for no longer."""
        body = self._client.get_object(**arguments)["Body"]
        return body.read(PART_BYTES), body

    async def _call(self, operation: str, name: str | None = None, **arguments: Any) -> Any:
        """Call S3 in a thread. Raises NotStored, Unavailable."""
        if name is not None:
            arguments["Key"] = self._prefix + name
        try:
            work = self._get if operation == GET else getattr(self._client, operation)
            return await self._run(work, Bucket=self._bucket, **arguments)
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if name is not None and (code in _MISSING or (operation in (ABORT, COMPLETE) and code == "NoSuchUpload")):
                raise NotStored(f"the store has no object {name}", value=name) from error
            if code in _PAST_THE_END:
                raise _PastTheEnd from error
            raise _unusable(error) from error

    async def _run(self, work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))
        except (BotoCoreError, OSError) as error:
            raise _unusable(error) from error


class S3Writing:
    """See `Writing`."""

    def __init__(self, store: S3Store, name: str) -> None:
        self._store = store
        self._name = name
        self._buffer = bytearray()
        self.size = 0
        self._upload_id = ""
        self._parts: list[dict[str, Any]] = []

    async def write(self, data: bytes) -> None:
        self._buffer += data
        self.size += len(data)
        while len(self._buffer) > UPLOAD_BYTES:  # so the last part, which may be smaller, is never empty
            await self._send(UPLOAD_BYTES)

    async def complete(self) -> None:
        """Make the object appear."""
        if not self._upload_id:
            await self._store._call("put_object", self._name, Body=bytes(self._buffer))
            return
        await self._send(len(self._buffer))
        try:
            await self._store._call(
                COMPLETE, self._name, UploadId=self._upload_id, MultipartUpload={"Parts": self._parts}
            )
        except NotStored as error:  # no such upload: was it completed by an attempt whose answer was lost?
            if not await self._is_complete():
                raise Unavailable(
                    "the store of files cannot be used: NoSuchUpload, the upload was aborted", param="storage.location"
                ) from error

    async def _is_complete(self) -> bool:
        """Whether the object is what was written, by its size and ETag. False if the ETags are no hashes."""
        try:
            facts = await self._store._call("head_object", self._name)
            digests = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in self._parts)
        except (NotStored, ValueError):
            return False
        etag = f"{md5(digests, usedforsecurity=False).hexdigest()}-{len(self._parts)}"
        return bool(facts["ContentLength"] == self.size and facts["ETag"].strip('"') == etag)

    async def abort(self) -> None:
        """Delete what was sent. If that fails, a sweep does it later."""
        self._buffer = bytearray()
        if self._upload_id:
            with suppress(NotStored, Unavailable):
                await self._store._call(ABORT, self._name, UploadId=self._upload_id)

    async def _send(self, count: int) -> None:
        if not self._upload_id:
            self._upload_id = (await self._store._call("create_multipart_upload", self._name))["UploadId"]
        number = len(self._parts) + 1
        with memoryview(self._buffer) as view:
            data = bytes(view[:count])
        sent = await self._store._call(
            "upload_part", self._name, UploadId=self._upload_id, PartNumber=number, Body=data
        )
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})
        del self._buffer[:count]


class _PastTheEnd(Exception):
    """A read began at or after the end of the object."""


def _time_of(answer: dict[str, Any]) -> datetime:
    """The server's time of an answer."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])


def _unusable(error: Exception) -> Unavailable:
    reason = _BEYOND_ASCII.sub(" ", str(error))[:300]
    return Unavailable(f"the store of files cannot be used: {reason}", param="storage.location")
