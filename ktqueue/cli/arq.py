"""`ktqueue bridge` and `ktqueue control`: run one arq worker in this process."""

from collections.abc import Awaitable, Callable

from ktqueue.cli.flags import CommonFlags, expand, settings
from ktqueue.core.config import Config


@expand
def bridge(common: CommonFlags) -> None:
    """Serve arq clients: `enqueue_job("generate", {...})`. Ctrl-C returns their jobs to arq's queue."""
    from ktqueue.workers.arq.bridge import run

    _serve(settings(common), run)


@expand
def control(common: CommonFlags) -> None:
    """Call the webhooks of ended jobs, and do other chores. Ctrl-C leaves the rest to the next control worker."""
    from ktqueue.workers.arq.control import run

    _serve(settings(common), run)


def _serve(config: Config, run: Callable[[Config], Awaitable[None]]) -> None:
    import asyncio

    from ktqueue.cli.connection import ask
    from ktqueue.core.logs import set_up_logging

    ask(config, lambda broker: broker.models.cards())  # fails at once if Redis cannot be reached
    set_up_logging(config.log)

    async def serve() -> None:
        await run(config)

    asyncio.run(serve())
