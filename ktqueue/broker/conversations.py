"""Which job answers in a conversation now, so that a reader who knows the conversation alone finds its stream."""

from dataclasses import dataclass

from ktqueue.broker.jobs import digest
from ktqueue.broker.scripts import Scripts
from ktqueue.broker.terminal_events import milliseconds
from ktqueue.core.codec import dumps, loads
from ktqueue.core.config import BrokerConfig

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """The latest answer of a conversation: its job, and whether its stream ends with a chunk of usage."""

    job_id: str
    include_usage: bool


class Conversations:
    """By tenant and the client's own id; forgotten after the idempotency TTL. Every call raises Unavailable."""

    def __init__(self, scripts: Scripts, config: BrokerConfig) -> None:
        self._scripts = scripts
        self._ttl = milliseconds(config.idempotency_ttl)

    async def begin(self, tenant: str, conversation_id: str, turn: Turn) -> Turn | None:
        """A new answer begins; the one that it takes the place of."""
        value = dumps({"v": _VERSION, "job": turn.job_id, "usage": turn.include_usage})
        return _decoded(await self._scripts.call("conversation", digest(tenant, conversation_id), value, self._ttl))

    async def find(self, tenant: str, conversation_id: str) -> Turn | None:
        """The latest answer; None for a conversation that is unknown or forgotten."""
        return _decoded(await self._scripts.call("conversation", digest(tenant, conversation_id), "", self._ttl))


def _decoded(value: bytes | None) -> Turn | None:
    if value is None:
        return None
    fields = loads(value)
    return Turn(fields["job"], fields["usage"]) if fields.get("v") == _VERSION else None
