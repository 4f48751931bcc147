"""`ktqueue down`: stops what `ktqueue up` runs on the state folder."""

from pathlib import Path

from ktqueue.cli.flags import CommonFlags, expand, settings
from ktqueue.cli.terminal.console import notes, results


@expand
def down(common: CommonFlags) -> None:
    """Stop what `ktqueue up` runs on the state folder, and wait for its end: jobs finish or wait for the next start.

    A second `ktqueue down` while it drains stops it at once.
    """
    from ktqueue.cli.terminal.waiting import Waiting
    from ktqueue.workers.supervision.detached import stop_detached

    config = settings(common)
    state = Path(config.broker.state_dir).absolute()
    try:
        with Waiting() as waiting:
            waiting.say("draining")
            stopped = stop_detached(config)
    except KeyboardInterrupt:
        notes().print("it goes on stopping; `ktqueue down` again stops it at once", style="dim", markup=False)
        raise
    said = f"stopped; {state} keeps the jobs" if stopped else f"nothing runs on {state} (--state-dir names another)"
    results().print(said, markup=False, soft_wrap=True)
