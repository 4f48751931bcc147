"""The loop of `ktqueue top`: take a snapshot at each interval and show it."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ktqueue.cli.terminal.console import results, write_json
from ktqueue.core.config import Config
from ktqueue.core.errors import Unavailable

if TYPE_CHECKING:
    from ktqueue.broker.snapshot import Snapshot

PATIENCE_SECONDS = 3.0  # a snapshot that takes longer counts as no answer
REMEMBERED_SECONDS = 15.0  # how long the remark that Redis was away is shown


@dataclass(frozen=True, slots=True)
class Look:
    """The latest snapshot. While Redis cannot be reached it is an older one, and `fault` says why."""

    snapshot: "Snapshot"
    fault: Unavailable | None = None
    remark: str = ""


async def watch(config: Config, interval: float, *, once: bool, as_json: bool) -> None:
    """Show a look at each interval until Ctrl-C. Raises Unavailable if Redis cannot be reached at the first."""
    from ktqueue.cli.top.view import frame

    console = results()
    moving = console.is_terminal and not console.is_dumb_terminal and not once and not as_json
    live = None
    if moving:
        from rich.live import Live

        live = Live(console=console, screen=True, auto_refresh=False)
    try:
        async with aclosing(looks(config, interval)) as stream:
            async for look in stream:
                if as_json:
                    write_json(_document(look), indent=None)
                elif live is not None:
                    live.start()
                    live.update(frame(look.snapshot, look.remark, console.height), refresh=True)
                else:
                    console.print(frame(look.snapshot, look.remark))
                    sys.stdout.write("" if once else "\n")
                    sys.stdout.flush()
                if once:
                    return
    except BrokenPipeError:  # `ktqueue top --json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
    finally:
        if live is not None:
            live.stop()


def _document(look: Look) -> dict[str, Any]:
    from ktqueue.cli.top.view import document

    return document(look.snapshot) if look.fault is None else {"time": time.time(), "error": look.fault.message}


async def looks(config: Config, interval: float) -> AsyncGenerator[Look, None]:
    """Take a Look every `interval` seconds, for ever. Raises Unavailable if Redis cannot be reached at the first."""
    from ktqueue.broker.broker import Broker
    from ktqueue.broker.snapshot import take_snapshot

    last: Snapshot | None = None
    away, seen_at, back_at, remark = False, 0.0, 0.0, ""
    async with await Broker.open(config.broker) as broker:
        while True:
            fault = None
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    last = await take_snapshot(broker)
            except (Unavailable, TimeoutError) as error:
                fault = error if isinstance(error, Unavailable) else Unavailable("Redis does not answer")
                if last is None:
                    raise fault from error
            now = time.monotonic()
            if fault is not None:
                away, remark = True, f"{now - seen_at:.0f} s without an answer, trying again: {fault.message}"
            elif away:
                away, back_at, remark = False, now, f"Redis is back after {now - seen_at:.0f} s"
            elif now - back_at > REMEMBERED_SECONDS:
                remark = ""
            if fault is None:
                seen_at = now
            yield Look(last, fault, remark)
            await asyncio.sleep(interval)
