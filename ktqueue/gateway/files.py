"""/v1/files: upload, list, read and delete files. The records are in Redis, the bytes in the store."""

import logging
from contextlib import aclosing

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from ktqueue.broker.files import FileFacts, FileLimits, FileRecord, content_name, new_file_id
from ktqueue.core.errors import FileLimitReached, FileNotFound, KtqueueError, Unavailable
from ktqueue.gateway.errors import RangeNotSatisfiable
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import Tenant, tenant_of
from ktqueue.gateway.http.byte_ranges import requested_range
from ktqueue.gateway.http.headers import check_origin
from ktqueue.gateway.http.responses import error_response, json_response
from ktqueue.gateway.http.upload_form import FORM_BYTES, UploadForm, boundary_of, file_too_large
from ktqueue.gateway.listing import limit_of, order_of, page_json
from ktqueue.openai.files import file_json, parse_upload
from ktqueue.storage.store import NotStored

MAX_LISTED = 10_000
CONTENT_TYPE = "application/octet-stream"

logger = logging.getLogger(__name__)


class FilesEndpoint(HTTPEndpoint):
    """/v1/files."""

    async def get(self, request: Request) -> Response:
        """List the tenant's files, newest first unless `order` is asc. Raises InvalidRequest."""
        gateway: Gateway = request.app.state.gateway
        query = request.query_params
        records, has_more = await gateway.broker.files.list(
            tenant_of(request).name,
            limit=limit_of(request, default=MAX_LISTED, most=MAX_LISTED),
            purpose=query.get("purpose"),
            order=order_of(request),
            after=query.get("after"),
        )
        return json_response(page_json(records, file_json, has_more=has_more))

    async def post(self, request: Request) -> Response:
        """Upload a file. Raises InvalidRequest, RequestTooLarge, FileLimitReached, and what bodies raise."""
        gateway: Gateway = request.app.state.gateway
        try:
            record = await self._upload(request, gateway)
        except KtqueueError as error:
            gateway.metrics.upload_refusals.labels(error.code).inc()
            raise
        gateway.metrics.uploads.inc()
        gateway.metrics.upload_bytes.inc(record.size)
        return json_response(file_json(record))

    async def _upload(self, request: Request, gateway: Gateway) -> FileRecord:
        check_origin(request.headers, gateway.config.gateway.cors_origins, "upload files")
        tenant = tenant_of(request)
        limits = FileLimits.of(gateway.config.storage, tenant.limits)
        form = UploadForm(boundary_of(request.headers), gateway.config.storage.max_file_bytes)
        least = await _check_size(request, gateway, tenant, limits)
        file_id = new_file_id()
        async with gateway.store.create(content_name(file_id)) as writing:
            async with aclosing(gateway.file_uploads.receive(request, (tenant.name, tenant.caller))) as parts:
                async for part in parts:
                    await writing.write(form.feed(part))
            form.end()
            fields = parse_upload(form.fields)
            if writing.size > least:
                await gateway.broker.files.check_room(tenant.name, writing.size, limits)
        facts = FileFacts(
            id=file_id,
            tenant=tenant.name,
            filename=form.filename,
            purpose=fields.purpose,
            size=writing.size,
            seconds=fields.seconds or gateway.config.storage.file_ttl,
        )
        try:
            return await gateway.broker.files.add(facts, limits)
        except FileLimitReached:  # another upload took the room meanwhile
            await _delete_content(gateway, file_id)
            raise


class FileEndpoint(HTTPEndpoint):
    """/v1/files/{id}."""

    async def get(self, request: Request) -> Response:
        """Return a file's record. Raises FileNotFound, also for a file of another tenant."""
        return json_response(file_json(await _find(request)))

    async def delete(self, request: Request) -> Response:
        """Delete a file. Raises FileNotFound, and FileInUse while a batch that has not ended reads it."""
        gateway: Gateway = request.app.state.gateway
        file_id = request.path_params["file_id"]
        await gateway.broker.files.delete(tenant_of(request).name, file_id)
        await _delete_content(gateway, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


async def read_content(request: Request) -> Response:
    """GET and HEAD /v1/files/{id}/content: the bytes of a file, or a range of them. Raises FileNotFound."""
    gateway: Gateway = request.app.state.gateway
    record = await _find(request)
    name = content_name(record.id)
    try:
        size = await gateway.store.size(name)
    except NotStored as error:
        raise FileNotFound(
            f"the bytes of file {record.id} are lost: they are not in the store (storage.location)",
            param="file_id",
            value=record.id,
        ) from error
    headers = {
        "accept-ranges": "bytes",
        "content-length": str(size),
        "content-disposition": "attachment",  # a browser shows no page that somebody uploaded
        "etag": f'"{record.id}"',  # the bytes of a file never change
        "x-content-type-options": "nosniff",
    }
    if request.method == "HEAD":
        return Response(headers=headers, media_type=CONTENT_TYPE)
    try:
        part = requested_range(request.headers, size, headers["etag"])
    except RangeNotSatisfiable as error:
        return error_response(error, {"content-range": f"bytes */{size}"}, path=request.url.path)
    status = 200
    if part is not None:
        status = 206
        headers |= {"content-length": str(len(part)), "content-range": f"bytes {part[0]}-{part[-1]}/{size}"}
    span = part or range(size)
    return _ContentResponse(gateway.store.read(name, span.start, len(span)), status, headers, CONTENT_TYPE)


class _ContentResponse(StreamingResponse):
    """Bytes of a file. If they are lost meanwhile, the connection ends, so the client sees that some are missing."""

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except (NotStored, Unavailable) as error:
            logger.warning("a file was not sent to its end: %s", error)


async def _find(request: Request) -> FileRecord:
    gateway: Gateway = request.app.state.gateway
    return await gateway.broker.files.get(tenant_of(request).name, request.path_params["file_id"])


async def _check_size(request: Request, gateway: Gateway, tenant: Tenant, limits: FileLimits) -> int:
    """Refuse an upload by its Content-Length before it is read. Returns the bytes for which there is room now.

    Raises RequestTooLarge, FileLimitReached.
    """
    announced = request.headers.get("content-length", "")
    size = max(0, int(announced) - FORM_BYTES) if announced.isdecimal() else 0
    limit = gateway.config.storage.max_file_bytes
    if size > limit:
        raise file_too_large(size, limit)
    await gateway.broker.files.check_room(tenant.name, size, limits)
    return size


async def _delete_content(gateway: Gateway, file_id: str) -> None:
    """Delete the bytes of a file without a record. If that fails, the control worker does it later."""
    try:
        await gateway.store.delete(content_name(file_id))
    except Unavailable as error:
        logger.warning("the bytes of %s are deleted later: %s", file_id, error.message)
