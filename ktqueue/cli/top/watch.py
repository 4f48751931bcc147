"""`ktqueue top` at work: a look at the installation every so often, shown or told until somebody leaves."""

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

PATIENCE_SECONDS = 3.0  # a look that takes longer has no answer
REMEMBERED_SECONDS = 15.0  # so long a frame tells that Redis was away


@dataclass(frozen=True, slots=True)
class Look:
    """The latest snapshot; while Redis is away an older one, and `fault` says why."""

    snapshot: "Snapshot"
    fault: Unavailable | None = None
    remark: str = ""


async def watch(config: Config, interval: float, *, once: bool, as_json: bool) -> None:
    """Show looks until there is no more; Ctrl-C ends it. Raises Unavailable when Redis is away at the first one."""
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
                    write_json(_told(look), indent=None)
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    finally:
        if live is not None:
            live.stop()


def _told(look: Look) -> dict[str, Any]:
    from ktqueue.cli.top.view import document

    return document(look.snapshot) if look.fault is None else {"time": time.time(), "error": look.fault.message}


async def looks(config: Config, interval: float) -> AsyncGenerator[Look, None]:
    """A Look every `interval` seconds, for ever. Raises Unavailable when Redis is away at the first one."""
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
