"""Which models are served, and by which workers."""

import asyncio
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ktqueue.broker.job_record import MICROSECONDS
from ktqueue.broker.scripts import Scripts
from ktqueue.core.codec import CodecError, decode_card, loads, reading
from ktqueue.core.errors import InvalidRequest, ModelNotFound, Unavailable
from ktqueue.core.model_card import ModelCard

RETRY_NO_WORKER = 5.0  # seconds
FRESH_CARDS = 1.0  # seconds in which `Models.card` does not ask again for a model that it knows
BOOT = Path("/proc/sys/kernel/random/boot_id")  # differs after each start of each machine; proc(5)
NAMESPACE = Path("/proc/self/ns/pid")  # the namespace of our process ids; pid_namespaces(7)
HELD_BY = "rows_held_by_"
"""Before the reason, in the name of a statistic that is 1. Statistics are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A live worker. process: see `process_name`. stats: from its last lease renewal. started_at: Unix seconds.

    lease_left: seconds until its lease expires unless it is renewed. step_age: seconds since its last step, None before
    the first one. Both by the server's clock.
    """

    worker_id: str
    model: str
    digest: str = ""
    max_num_seqs: int
    running: int
    host: str
    process: str
    started_at: float
    stats: Mapping[str, float]
    lease_left: float
    step_age: float | None

    @property
    def pid(self) -> int:
        """Its process id on its own machine or container."""
        return int(self.process.rpartition(":")[2])

    @property
    def rows_held_by(self) -> str:
        """What keeps its batch jobs from more rows: see EngineStats. '' if nothing does."""
        return next((name.removeprefix(HELD_BY) for name in self.stats if name.startswith(HELD_BY)), "")


def process_name(pid: int, namespace: Path = NAMESPACE) -> str:
    """A unique name for the process with this id in `namespace`, which is ours by default.

    A host name is not enough: machines and containers may share one, and small process ids repeat in each container.
    """
    try:
        place = f"{BOOT.read_text().strip()}:{namespace.stat().st_ino}"
    except OSError:  # not Linux
        place = socket.gethostname()
    return f"{place}:{pid}"


def model_not_found(name: str, cards: Iterable[ModelCard]) -> ModelNotFound:
    """The error for a model that no worker serves. It names the models that are served."""
    served = ", ".join(card.name for card in cards) or "none"
    return ModelNotFound(
        f"no worker serves the model {name[:256]!r}; served: {served}", param="model", limit=served, value=name[:256]
    )


def find_card(cards: Sequence[ModelCard], name: str) -> ModelCard | None:
    """The card of the model with this name, else of one with this alias."""
    named = next((card for card in cards if card.name == name), None)
    return named or next((card for card in cards if name in card.aliases), None)


class Models:
    """The models and workers of an installation. Every call raises Unavailable if Redis does not answer."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._known: list[ModelCard] = []
        self._known_at = -FRESH_CARDS
        self._asking = asyncio.Lock()  # many requests that begin together ask once

    async def cards(self) -> list[ModelCard]:
        """Cards of the models that have a live worker or had one within the model TTL, sorted by name."""
        cards = []
        for card, more in await self._scripts.call("list_models"):
            with suppress(CodecError), reading("a model"):
                cards.append(decode_card(card, more))
        return sorted(cards, key=lambda card: card.name)

    async def card(self, name: str) -> ModelCard | None:
        """The card of the model with this name or alias, or None if nobody serves it. At most FRESH_CARDS old."""
        if (card := self._fresh_card(name)) is not None:
            return card
        async with self._asking:
            if (card := self._fresh_card(name)) is not None:
                return card
            self._known = await self.cards()
            self._known_at = time.monotonic()
            return find_card(self._known, name)

    def _fresh_card(self, name: str) -> ModelCard | None:
        is_fresh = time.monotonic() < self._known_at + FRESH_CARDS
        return find_card(self._known, name) if is_fresh else None

    async def names(self) -> list[str]:
        """Names of the models with a live worker, or of all in `cards` if no model has one."""
        names = [card.name for card in await self.cards()]
        live = {worker.model for worker in await self.workers()} if len(names) > 1 else set()
        return [name for name in names if name in live] or names

    async def only_name(self) -> str:
        """The name of the only model. Raises InvalidRequest if there are several, Unavailable if there is none."""
        names = await self.names()
        if not names:
            raise Unavailable("no worker serves any model yet", param="model", retry_after=RETRY_NO_WORKER)
        if len(names) > 1:
            served = ", ".join(names)
            raise InvalidRequest(
                f"model is missing, and must be one of those served: {served}", param="model", limit=served
            )
        return names[0]

    async def workers(self) -> list[WorkerInfo]:
        """Workers with a valid lease, sorted by id."""
        workers = []
        for worker_id, *described in await self._scripts.call("list_workers"):
            with suppress(CodecError), reading("a worker"):
                workers.append(_worker(worker_id, *described))
        return sorted(workers, key=lambda worker: worker.worker_id)


def _worker(
    worker_id: bytes,
    card_bytes: bytes,
    facts_bytes: bytes,
    stats: bytes,
    started: bytes,
    running: int,
    left: int,
    age: int | None,
    more: bytes | None,
) -> WorkerInfo:
    """A worker in a reply of list_workers."""
    card, facts = decode_card(card_bytes, more), loads(facts_bytes)
    return WorkerInfo(
        worker_id=worker_id.decode(),
        model=card.name,
        digest=card.digest,
        max_num_seqs=card.max_num_seqs,
        running=running,
        host=facts["host"],
        process=facts["process"],
        started_at=int(started) / MICROSECONDS,
        stats={name: value + 0 for name, value in loads(stats).items()},  # raises TypeError for what is no number
        lease_left=left / MICROSECONDS,
        step_age=None if age is None else age / MICROSECONDS,
    )
