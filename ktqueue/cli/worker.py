"""`ktqueue worker`: one worker, which serves one model, in this process."""

import logging

import typer

from ktqueue.cli.flags import CommonFlags, EngineFlags, expand, settings


@expand
def worker(common: CommonFlags, engine: EngineFlags) -> None:
    """Load a model and run jobs until told to stop; Ctrl-C drains, a second one leaves at once."""
    from ktqueue.cli.progress import Bar
    from workers.run import run

    config = settings(common, engine=engine)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    with Bar("loading", in_bytes=True) as bar:
        code = run(config, bar.update)
    raise typer.Exit(code)
