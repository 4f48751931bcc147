"""Routes about the gateway and its cluster: probes, /version, /metrics, /v1/status, /openapi.json and /."""

import asyncio
import time
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ktqueue import __version__
from ktqueue.broker.broker import Broker
from ktqueue.broker.snapshot import take_snapshot
from ktqueue.core.codec import dumps
from ktqueue.core.errors import KtqueueError, Unavailable
from ktqueue.core.tenants import DEFAULT_TENANT
from ktqueue.gateway.cluster_metrics import batch_metrics, bound_metrics, queue_metrics, tenant_metrics, worker_metrics
from ktqueue.gateway.endpoints import DESCRIPTIONS
from ktqueue.gateway.errors import PermissionDenied, ShuttingDown
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import tenant_of
from ktqueue.gateway.http.responses import json_response
from ktqueue.gateway.metrics import CONTENT_TYPE, Metric, gauge
from ktqueue.openai.document import build_document

SHARED_SECONDS = 1.0  # how long one snapshot serves all readers


class StatusReader:
    """Takes at most one snapshot of the broker a second, however many pages ask."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._taken_at = float("-inf")
        self._document: dict[str, Any] = {}

    async def read(self, broker: Broker) -> dict[str, Any]:
        """The latest snapshot as JSON values. Raises Unavailable."""
        async with self._lock:
            if time.monotonic() - self._taken_at >= SHARED_SECONDS:
                self._document = (await take_snapshot(broker)).document()
                self._taken_at = time.monotonic()
            return self._document


async def healthz(request: Request) -> Response:
    """200 as long as the process answers."""
    return json_response({"status": "ok"})


async def version(request: Request) -> Response:
    """The version of ktqueue."""
    return json_response({"version": __version__})


async def readyz(request: Request) -> Response:
    """200 if a live worker serves a model. Raises Unavailable without a broker or a live worker.

    If there are API keys, only clients with a key learn which models are served and where Redis is.
    """
    gateway: Gateway = request.app.state.gateway
    known = gateway.keys.accepts(request.headers)
    if gateway.draining:
        raise ShuttingDown("the gateway is shutting down")
    try:
        workers = await gateway.broker.models.workers()
    except Unavailable as error:
        raise error if known else Unavailable("Redis does not answer", retry_after=error.retry_after) from None
    if not workers:
        raise Unavailable("no worker is alive", retry_after=2)
    if not known:
        return json_response({"status": "ok"})
    return json_response(
        {"status": "ok", "workers": len(workers), "models": sorted({worker.model for worker in workers})}
    )


async def metrics(request: Request) -> Response:
    """Prometheus' text format: this gateway's own metrics, and those of queues and workers from Redis.

    Raises PermissionDenied for a tenant's key, since the figures include all tenants.
    """
    _check_operator(request, "metrics need")
    gateway: Gateway = request.app.state.gateway
    snapshot: list[Metric] = []
    up = gauge("broker_up", "Whether the broker answered.", ())
    try:
        depths, bound = await gateway.broker.jobs.depth(), await gateway.broker.jobs.bound()
        workers = await gateway.broker.models.workers()
        loads = await gateway.broker.jobs.tenant_loads([tenant.name for tenant in gateway.config.gateway.tenants])
        batches = await gateway.broker.batches.load()
        up.add_metric((), 1)
        snapshot = [
            *queue_metrics(depths),
            *bound_metrics(bound),
            *batch_metrics(batches),
            *tenant_metrics(loads),
            *worker_metrics(workers, [depth.model for depth in depths]),
        ]
    except KtqueueError:
        up.add_metric((), 0)
    return Response(gateway.metrics.exposition([up, *snapshot]), headers={"content-type": CONTENT_TYPE})


async def status(request: Request) -> Response:
    """Workers and queues at this moment, and how soon this gateway's requests got their first token.

    Raises PermissionDenied for a tenant's key, Unavailable.
    """
    _check_operator(request, "the status needs")
    gateway: Gateway = request.app.state.gateway
    reader: StatusReader = request.app.state.status
    document = await reader.read(gateway.broker)
    seconds, count = gateway.metrics.first_token_totals()
    return json_response({**document, "first_token": {"seconds": seconds, "count": count}})


def _check_operator(request: Request, what: str) -> None:
    if tenant_of(request).name != DEFAULT_TENANT:
        raise PermissionDenied(f"{what} a key of gateway.api_keys", param="Authorization")


async def openapi(request: Request) -> Response:
    """The OpenAPI 3.1 document of this API."""
    return Response(await asyncio.to_thread(_document), media_type="application/json")


@cache  # making it takes a gateway 70 ms, and most gateways are never asked
def _document() -> bytes:
    return dumps(build_document(DESCRIPTIONS))


async def pointer(request: Request) -> Response:
    """A short text that lists the routes."""
    return PlainTextResponse(
        f"ktqueue {__version__}: an OpenAI-compatible gateway.\n"
        "POST /v1/chat/completions, /v1/completions, /v1/jobs\n"
        "GET /v1/models, /v1/jobs, /healthz, /readyz, /metrics, /version, /openapi.json\n"
    )
