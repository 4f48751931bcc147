"""One pub/sub connection for all subscriptions of a process. Knows channels and bytes, but no jobs.

A reader gets a mailbox of bounded size. `Mail.missed` says that messages may be lost, because the connection broke or
the mailbox overflowed. Then the reader must read the source again.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ktqueue.broker.redis.connection import jittered
from ktqueue.broker.redis.node import RedisSubscriber
from ktqueue.broker.redis.wake_up import WakeUp
from ktqueue.core.errors import ConfigError, Unavailable

QUIET_SECONDS = 5.0  # without messages, then a PING; after the same time without an answer the connection is closed
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between attempts to reconnect


@dataclass(frozen=True, slots=True)
class Mail:
    """Messages since the last `take`. `missed`: others may be lost."""

    messages: tuple[bytes, ...]
    missed: bool


class Mailbox:
    """Messages of some channels for one reader, at most `max_bytes` bytes. `missed`: some were dropped since `take`."""

    def __init__(self, channels: tuple[str, ...], max_bytes: int) -> None:
        self.channels = channels
        self._max_bytes = max_bytes
        self._messages: deque[bytes] = deque()
        self.held_bytes = 0
        self.missed = False
        self._arrived = WakeUp()

    def put(self, message: bytes) -> None:
        """Add a message. An overflow drops all messages and sets `missed`."""
        if self.held_bytes + len(message) > self._max_bytes:
            self.miss()
            return
        self._messages.append(message)
        self.held_bytes += len(message)
        self._arrived.set()

    def miss(self) -> None:
        """Drop all messages and set `missed`, so that the reader reads the source again."""
        self._messages.clear()
        self.held_bytes = 0
        self.missed = True
        self._arrived.set()

    async def take(self, seconds: float) -> Mail:
        """Take all messages. Waits at most `seconds` for the first, then returns an empty Mail."""
        await self._arrived.wait(seconds)
        mail = Mail(tuple(self._messages), self.missed)
        self._messages.clear()
        self.held_bytes = 0
        self.missed = False
        self._arrived.clear()
        return mail


@dataclass(slots=True)
class _Topic:
    """A channel: its readers, its unacknowledged SUBSCRIBEs, and whether its connection broke."""

    mailboxes: set[Mailbox] = field(default_factory=set)
    unacknowledged: int = 0
    cut_off: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Hub:
    """Shares one connection among all mailboxes. Reconnects forever while there are mailboxes."""

    def __init__(self, open_subscriber: Callable[[], Awaitable[RedisSubscriber]]) -> None:
        self._open = open_subscriber
        self._topics: dict[str, _Topic] = {}
        self._subscriber: RedisSubscriber | None = None
        self._task: asyncio.Task[None] | None = None
        self._pause = FIRST_PAUSE
        self._heard = False  # whether anything was received since the last check
        self._fault = ""  # why the last connection was lost

    def mailboxes(self, channel: str) -> frozenset[Mailbox]:
        """The mailboxes that get the messages of a channel."""
        topic = self._topics.get(channel)
        return frozenset(topic.mailboxes) if topic else frozenset()

    @property
    def channels(self) -> frozenset[str]:
        """The channels that this process subscribes to, including those that it is leaving."""
        return frozenset(self._topics)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the messages that wait in all mailboxes. A mailbox of several channels counts once."""
        mailboxes = {mailbox for topic in self._topics.values() for mailbox in topic.mailboxes}
        return sum(mailbox.held_bytes for mailbox in mailboxes)

    async def subscribe(self, *channels: str, max_bytes: int, seconds: float) -> Mailbox:
        """Make a mailbox that gets every message from now on: the server has acknowledged the subscription.

        Raises Unavailable if that takes longer than `seconds`.
        """
        mailbox = Mailbox(channels, max_bytes)
        topics = {channel: self._topics.setdefault(channel, _Topic()) for channel in channels}
        new = [channel for channel, topic in topics.items() if not topic.mailboxes]
        for topic in topics.values():
            topic.mailboxes.add(mailbox)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="ktqueue-hub")
        try:
            for channel in new:
                await self._send_subscribe(channel, topics[channel])
            async with asyncio.timeout(seconds):
                for topic in topics.values():
                    await topic.ready.wait()
        except BaseException as error:
            await self.unsubscribe(mailbox)
            if isinstance(error, TimeoutError):
                reason = f": {self._fault}" if self._fault else ""
                raise Unavailable(f"Redis is away: no answer to SUBSCRIBE{reason}", retry_after=1.0) from error
            raise
        return mailbox

    async def unsubscribe(self, mailbox: Mailbox) -> None:
        """Close a mailbox. The last reader of a channel unsubscribes from it."""
        for channel in mailbox.channels:
            topic = self._topics.get(channel)
            if topic is None:
                continue
            topic.mailboxes.discard(mailbox)
            if not topic.mailboxes:
                topic.ready.clear()
                if self._subscriber is None:
                    del self._topics[channel]
                else:
                    with contextlib.suppress(Unavailable):  # a lost connection has no subscriptions
                        await self._subscriber.send("UNSUBSCRIBE", channel)

    async def close(self) -> None:
        """Close the connection. Mailboxes get no more messages."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._topics.clear()

    async def _send_subscribe(self, channel: str, topic: _Topic) -> None:
        if self._subscriber is not None:  # else the running task subscribes to all channels once it is connected
            topic.unacknowledged += 1
            with contextlib.suppress(Unavailable):
                await self._subscriber.send("SUBSCRIBE", channel)

    async def _run(self) -> None:
        self._pause = FIRST_PAUSE
        while True:
            try:
                subscriber = await self._open()
                try:
                    await self._resubscribe(subscriber)
                    await self._receive(subscriber)
                finally:
                    self._subscriber = None
                    await subscriber.close()
            except (Unavailable, ConfigError) as error:
                self._fault = error.message
            await asyncio.sleep(jittered(self._pause))
            self._pause = min(self._pause * 2, LONGEST_PAUSE)

    async def _resubscribe(self, subscriber: RedisSubscriber) -> None:
        self._topics = {channel: topic for channel, topic in self._topics.items() if topic.mailboxes}
        channels = list(self._topics)
        for topic in self._topics.values():
            topic.ready.clear()
            topic.unacknowledged = 1
            topic.cut_off = True
        self._subscriber = subscriber
        for start in range(0, len(channels), 512):
            await subscriber.send("SUBSCRIBE", *channels[start : start + 512])

    async def _receive(self, subscriber: RedisSubscriber) -> None:
        asking = asyncio.create_task(self._ask(subscriber), name="ktqueue-hub-ping")
        try:
            while True:
                push = await subscriber.receive()
                self._heard = True
                self._pause = FIRST_PAUSE  # the connection works
                await self._handle(push, subscriber)
        finally:
            asking.cancel()

    async def _ask(self, subscriber: RedisSubscriber) -> None:
        """Send PING after a quiet time, and close the connection if nothing is received then either.

        A time limit on each receive would cost more than the receive itself.
        """
        with contextlib.suppress(Unavailable):  # the connection is lost, which `receive` reports too
            while True:
                self._heard = False
                await asyncio.sleep(QUIET_SECONDS)
                if self._heard:
                    continue
                await subscriber.send("PING")
                await asyncio.sleep(QUIET_SECONDS)
                if not self._heard:
                    await subscriber.close()
                    return

    async def _handle(self, push: list[Any], subscriber: RedisSubscriber) -> None:
        kind = push[0]
        if kind == b"message":
            topic = self._topics.get(push[1].decode())
            for mailbox in topic.mailboxes if topic else ():
                mailbox.put(push[2])
        elif kind == b"subscribe":
            await self._acknowledged(push[1].decode(), subscriber)
        elif kind == b"unsubscribe":
            self._left(push[1].decode())

    async def _acknowledged(self, channel: str, subscriber: RedisSubscriber) -> None:
        topic = self._topics.get(channel)
        if topic is None:
            return
        topic.unacknowledged -= 1
        if topic.unacknowledged > 0:
            return
        if not topic.mailboxes:  # its readers have left meanwhile
            await subscriber.send("UNSUBSCRIBE", channel)
            return
        if topic.cut_off:
            topic.cut_off = False
            for mailbox in topic.mailboxes:
                mailbox.miss()
        topic.ready.set()

    def _left(self, channel: str) -> None:
        topic = self._topics.get(channel)
        if topic is not None and not topic.mailboxes and topic.unacknowledged <= 0:
            del self._topics[channel]
