"""Responses of /v1/responses that are stored for a while: their conversation, and their answer once it is known."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ktqueue.broker.jobs import digest
from ktqueue.broker.scripts import Scripts
from ktqueue.broker.terminal_events import milliseconds
from ktqueue.core.codec import CodecError, dumps, loads, reading
from ktqueue.core.config import BrokerConfig

_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response. `messages` are the conversation before its answer, `echo` the fields that the answer repeats.

    `answer` is the response object, or None while only the job's journal has it.
    """

    messages: Sequence[Mapping[str, Any]]
    echo: Mapping[str, Any]
    answer: Mapping[str, Any] | None = None


class Responses:
    """Responses by tenant and id. Every call may raise Unavailable."""

    def __init__(self, scripts: Scripts, config: BrokerConfig) -> None:
        self._scripts = scripts
        self._ttl = milliseconds(config.response_ttl)
        self._most_bytes = config.max_response_bytes

    async def store(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Store a response for `broker.response_ttl`. The oldest of the tenant are deleted if they take too much."""
        value = dumps({"v": _VERSION, "messages": response.messages, "echo": response.echo, "answer": response.answer})
        if len(value) <= self._most_bytes:
            await self._call("store", tenant, response_id, value)

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response, or None if it is unknown, was deleted, has expired or is damaged."""
        value = await self._call("read", tenant, response_id, b"")
        with suppress(CodecError), reading("a response"):
            fields = loads(value or "{}")
            if fields.get("v") == _VERSION:
                return StoredResponse(fields["messages"], fields["echo"], fields["answer"])
        return None

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response, if there is one."""
        await self._call("delete", tenant, response_id, b"")

    async def _call(self, action: str, tenant: str, response_id: str, value: bytes) -> Any:
        name = digest(tenant, response_id)
        return await self._scripts.call("stored_response", action, tenant, name, value, self._ttl, self._most_bytes)
