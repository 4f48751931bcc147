"""`ktqueue bridge`: arq's worker alone, in this process."""

import typer

from ktqueue.cli.failures import ExitCode
from ktqueue.cli.flags import CommonFlags, expand, settings


@expand
def bridge(common: CommonFlags) -> None:
    """Serve arq's clients: `enqueue_job("generate", {...})`. Ctrl-C gives their jobs back to arq's queue."""
    import asyncio
    import logging

    from ktqueue.cli.connection import ask
    from workers.bridge import run

    config = settings(common)
    ask(config, lambda broker: broker.models.cards())  # say at once that Redis is away
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(run(config))
    raise typer.Exit(ExitCode.OK)
