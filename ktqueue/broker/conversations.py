"""Finds the job that answers in a conversation, for a reader that knows only the conversation's id."""

from contextlib import suppress
from dataclasses import dataclass

from ktqueue.broker.jobs import digest
from ktqueue.broker.scripts import Scripts
from ktqueue.broker.terminal_events import milliseconds
from ktqueue.core.codec import CodecError, dumps, loads, reading
from ktqueue.core.config import BrokerConfig

_VERSION = 1


@dataclass(frozen=True, slots=True)
class LatestAnswer:
    """The latest answer of a conversation: its job, and whether its stream ends with a usage chunk."""

    job_id: str
    include_usage: bool


class Conversations:
    """Latest answers by tenant and conversation id, kept for the idempotency TTL. Every call may raise Unavailable."""

    def __init__(self, scripts: Scripts, config: BrokerConfig) -> None:
        self._scripts = scripts
        self._ttl = milliseconds(config.idempotency_ttl)

    async def begin(self, tenant: str, conversation_id: str, answer: LatestAnswer) -> LatestAnswer | None:
        """Store a new answer. Returns the answer before it."""
        value = dumps({"v": _VERSION, "job": answer.job_id, "usage": answer.include_usage})
        return _decoded(await self._scripts.call("conversation", digest(tenant, conversation_id), value, self._ttl))

    async def find(self, tenant: str, conversation_id: str) -> LatestAnswer | None:
        """The latest answer, or None if the conversation is unknown or has expired."""
        return _decoded(await self._scripts.call("conversation", digest(tenant, conversation_id), "", self._ttl))


def _decoded(value: bytes | None) -> LatestAnswer | None:
    if value is None:
        return None
    with suppress(CodecError), reading("a conversation"):
        fields = loads(value)
        return LatestAnswer(fields["job"], fields["usage"]) if fields.get("v") == _VERSION else None
    return None
