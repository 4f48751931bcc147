"""GET /v1/status: workers and queues at this moment, and how soon this gateway's requests got their first token."""

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ktqueue.broker.broker import Broker
from ktqueue.broker.snapshot import take_snapshot
from ktqueue.core.tenants import DEFAULT_TENANT
from ktqueue.gateway.errors import PermissionDenied
from ktqueue.gateway.gateway import Gateway
from ktqueue.gateway.http.auth import tenant_of
from ktqueue.gateway.http.responses import json_response

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


async def status(request: Request) -> Response:
    """The state of workers and queues. Raises PermissionDenied for a tenant's key, Unavailable."""
    if tenant_of(request).name != DEFAULT_TENANT:
        raise PermissionDenied("the status needs a key of gateway.api_keys", param="Authorization")
    gateway: Gateway = request.app.state.gateway
    reader: StatusReader = request.app.state.status
    document = await reader.read(gateway.broker)
    seconds, count = gateway.metrics.first_token_totals()
    return json_response({**document, "first_token": {"seconds": seconds, "count": count}})
