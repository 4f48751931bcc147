"""/v1/batches: create, list, get and cancel batches. Control workers run them."""

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from ktqueue.anthropic.endpoints import BATCH_ENDPOINTS
from ktqueue.core.errors import FileNotFound, InvalidRequest
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import tenant_of
from ktqueue.gateway.http.headers import idempotency_key
from ktqueue.gateway.http.responses import json_response
from ktqueue.gateway.listing import limit_of, page_json
from ktqueue.openai.batches import BatchBody, batch_json
from ktqueue.openai.validation import parse

MAX_LISTED = 100


class BatchesEndpoint(HTTPEndpoint):
    """/v1/batches."""

    async def get(self, request: Request) -> Response:
        """List the tenant's batches, newest first. Raises InvalidRequest."""
        gateway: Gateway = request.app.state.gateway
        records, has_more = await gateway.broker.batches.list(
            tenant_of(request).name,
            limit=limit_of(request, default=20, most=MAX_LISTED),
            after=request.query_params.get("after"),
        )
        return json_response(page_json(records, batch_json, has_more=has_more))

    async def post(self, request: Request) -> Response:
        """Create a batch of an uploaded file. Raises InvalidRequest, FileNotFound, TooManyBatches."""
        gateway: Gateway = request.app.state.gateway
        tenant = tenant_of(request)
        body = parse(BatchBody, (await gateway.bodies.read(request)).value)
        wanted = body.request(tuple(BATCH_ENDPOINTS))
        key = idempotency_key(request.headers)
        record = None
        if key is not None:
            record = await gateway.broker.batches.find(wanted, tenant=tenant.name, idempotency_key=key)
        if record is None:
            await _check_input(gateway, tenant.name, body.input_file_id)
            record = await gateway.broker.batches.create(
                wanted,
                window_seconds=body.window_seconds,
                tenant=tenant.name,
                caller=tenant.caller,
                idempotency_key=key,
            )
        return json_response(batch_json(record))


async def get_batch(request: Request) -> Response:
    """GET /v1/batches/{id}. Raises BatchNotFound, also for a batch of another tenant."""
    gateway: Gateway = request.app.state.gateway
    record = await gateway.broker.batches.get(tenant_of(request).name, request.path_params["batch_id"])
    return json_response(batch_json(record))


async def cancel_batch(request: Request) -> Response:
    """POST /v1/batches/{id}/cancel. Cancelling it again is no error. Raises BatchNotFound, BatchConflict."""
    gateway: Gateway = request.app.state.gateway
    record = await gateway.broker.batches.cancel(tenant_of(request).name, request.path_params["batch_id"])
    return json_response(batch_json(record))


async def _check_input(gateway: Gateway, tenant: str, file_id: str) -> None:
    """Check that a tenant has the file, and for batches. Raises FileNotFound, InvalidRequest."""
    try:
        file = await gateway.broker.files.get(tenant, file_id)
    except FileNotFound as error:
        error.param = "input_file_id"
        raise
    if file.purpose != "batch":
        raise InvalidRequest(
            f"input_file_id must be a file with the purpose batch, this one has {file.purpose!r}",
            param="input_file_id",
            limit="batch",
            value=file.purpose,
        )
