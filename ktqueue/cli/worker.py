"""`ktqueue worker`: one worker in this process, which serves one model."""

from contextlib import ExitStack
from functools import partial

from ktqueue.cli.flags import CommonFlags, EngineFlags, ProfileFlags, expand, settings
from ktqueue.cli.model import with_model
from ktqueue.cli.terminal.failures import require


@expand
def worker(common: CommonFlags, engine: EngineFlags, profile: ProfileFlags) -> None:
    """Load a model and run jobs until Ctrl-C, which drains; a second Ctrl-C exits at once."""
    from ktqueue.cli.connection import check_redis
    from ktqueue.cli.terminal.progress import Bar
    from ktqueue.core.logs import set_up_logging

    config = settings(common, engine=engine, profile=profile)
    require("worker")
    check_redis(config)
    from ktqueue.workers.exit_codes import leave
    from ktqueue.workers.generation.worker_process import run  # seconds: it imports torch

    config = with_model(config)
    set_up_logging(config.log)
    with ExitStack() as bars:
        shown: dict[str, Bar] = {}  # one bar after the other

        def show(title: str, done: int, total: int, what: str) -> None:
            if title not in shown:
                shown[title] = bars.enter_context(Bar(title, in_bytes=title == "loading"))
            shown[title].update(done, total, what)
            if done >= total:
                shown[title].finish()

        code = run(config, partial(show, "loading"), partial(show, "capturing"))
    leave(code)
