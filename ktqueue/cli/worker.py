"""`ktqueue worker`: one worker, which serves one model, in this process."""

import logging
from typing import TYPE_CHECKING

from ktqueue.cli.flags import CommonFlags, EngineFlags, expand, settings

if TYPE_CHECKING:
    from ktqueue.broker.broker import Broker


@expand
def worker(common: CommonFlags, engine: EngineFlags) -> None:
    """Load a model and run jobs until told to stop; Ctrl-C drains, a second one leaves at once."""
    from ktqueue.cli.connection import ask
    from ktqueue.cli.progress import Bar
    from workers.run import leave, run

    config = settings(common, engine=engine)
    ask(config, _answers)  # a large model takes long to load: say at once that Redis is away
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    with Bar("loading", in_bytes=True) as bar:

        def progress(done: int, total: int, what: str) -> None:
            bar.update(done, total, what)
            if done >= total:
                bar.finish()

        code = run(config, progress)
    leave(code)


async def _answers(broker: "Broker") -> None:
    await broker.models.cards()
