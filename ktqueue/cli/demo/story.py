"""The story of `ktqueue demo`: streamed over HTTP while its worker is killed."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktqueue.cli.chat.talkers import stream_document
from ktqueue.cli.terminal.console import Wrapped, results, write
from ktqueue.core.errors import KtqueueError, Unavailable

if TYPE_CHECKING:
    from ktqueue.broker.broker import Broker
    from ktqueue.workers.supervision.child import Child


class TooLate(KtqueueError):
    """The story was complete before its worker was dead."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """A worker was killed and another continued: their pids, its first token (from 1), and the seconds between."""

    killed: int
    successor: int
    token: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Story:
    """A streamed story. Times in seconds."""

    text: str
    token_ids: tuple[int, ...]
    first_token: float
    seconds: float
    takeover: Takeover | None


class StoryPage:
    """Shows a story on the terminal while it is streamed, with a line where its worker was killed."""

    def __init__(self) -> None:
        self._text = Wrapped(results().width)

    def add(self, text: str) -> None:
        """Show more text."""
        self._text.add(text)

    def killed(self, pid: int) -> None:
        """A worker was killed, and all of its text is shown. For a moment there is no new text."""
        self._text.pause()
        results().print(f"  [bold red]kill -9 {pid}[/], the only worker ... ", end="", soft_wrap=True)

    def taken_over(self, takeover: Takeover) -> None:
        """Another worker continues the text."""
        milliseconds = 1000 * takeover.seconds
        results().print(
            f"[bold green]{takeover.successor}[/] continues at token {takeover.token}, {milliseconds:.0f} ms later\n",
            soft_wrap=True,
        )

    def end(self, *, complete: bool) -> None:
        """Write the rest of the story."""
        self._text.add("" if complete else " ...")
        self._text.end()
        write("\n")


async def stream_story(
    url: str,
    body: Mapping[str, Any],
    broker: "Broker",
    *,
    page: StoryPage | None = None,
    victim: "Child | None" = None,
    kill_at: int = 0,
) -> Story:
    """Stream one chat completion to its end; `victim` gets SIGKILL after event `kill_at` of the job.

    Raises Unavailable, TooLate, and KtqueueError if the stream has a gap or a repetition.
    """
    import httpx

    # The chunks of a conversation carry the number of their event.
    headers = {"X-Conversation-Id": f"story-{os.urandom(8).hex()}"}
    began = time.monotonic()
    first: float | None = None
    death: _Death | None = None
    takeover: Takeover | None = None
    texts: list[str] = []
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers) as response,
        ):
            response.raise_for_status()
            job_id = response.headers["x-job-id"]
            seq, shown = 0, False
            async for line in response.aiter_lines():
                if line.startswith("id:"):
                    seq = int(line[3:].partition(".")[0])
                for choice in stream_document(line).get("choices", ()):
                    if death is not None and takeover is None and seq > death.last_seq:
                        assert victim is not None
                        takeover = Takeover(death.pid, victim.pid or 0, death.tokens + 1, time.monotonic() - death.at)
                        if page is not None:
                            page.taken_over(takeover)
                    if text := choice["delta"].get("content"):
                        first = first if first is not None else time.monotonic() - began
                        texts.append(text)
                        if page is not None:
                            page.add(text)
                if victim is not None and death is None and seq >= kill_at:
                    death = await _kill(victim, broker, job_id)
                if death is not None and not shown and seq >= death.last_seq:
                    shown = True
                    if page is not None:
                        page.killed(death.pid)
    except httpx.HTTPError as error:
        raise Unavailable(f"{url}: {error or type(error).__name__}") from error
    seconds = time.monotonic() - began
    events = await broker.journal.replay(job_id)
    if "".join(texts) != "".join(event.text for event in events):
        raise KtqueueError(f"the stream of {job_id} differs from its journal")
    token_ids = tuple(token_id for event in events for token_id in event.token_ids)
    return Story("".join(texts), token_ids, first or 0.0, seconds, takeover)


@dataclass(frozen=True, slots=True)
class _Death:
    pid: int
    at: float
    last_seq: int  # of the last event that it wrote
    tokens: int  # in its events


async def _kill(victim: "Child", broker: "Broker", job_id: str) -> _Death:
    """Kill a worker, and read how far it came. Raises TooLate if the job was complete by then."""
    pid = victim.pid
    if pid is None:
        raise KtqueueError("the worker was dead before it was killed")
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    while _runs(pid):  # noqa: ASYNC110 # the process is not a child of this one, so its end cannot be awaited
        await asyncio.sleep(0.001)
    events = await broker.journal.replay(job_id)
    if events[-1].state is not None:
        raise TooLate(f"{job_id} was complete before its worker was dead")
    return _Death(pid, killed_at, events[-1].seq, sum(len(event.token_ids) for event in events))


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()  # not of a zombie
