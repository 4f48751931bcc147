"""`ktqueue top`: watch workers, queues and tokens per second."""

from contextlib import suppress
from typing import Annotated

import typer

from ktqueue.cli.flags import CommonFlags, expand, settings


@expand
def top(
    common: CommonFlags,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the state once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON for programs, one line for each update.")] = False,
) -> None:
    """Watch workers, queues and tokens per second. Ctrl-C exits."""
    import asyncio

    from ktqueue.cli.top.watch import watch

    config = settings(common)
    with suppress(KeyboardInterrupt):
        asyncio.run(watch(config, interval, once=once, as_json=as_json))
