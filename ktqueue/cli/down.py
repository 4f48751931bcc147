"""`ktqueue down`: stops what `ktqueue up` runs on the state folder."""

from pathlib import Path

from ktqueue.cli.flags import CommonFlags, expand, settings
from ktqueue.cli.terminal.console import notes, results


@expand
def down(common: CommonFlags) -> None:
    """Stop what `ktqueue up` runs on the state folder, and wait until it has stopped.

    Running jobs finish, or wait for the next start. A second `ktqueue down` meanwhile stops it at once.
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
        notes().print("it is still stopping; `ktqueue down` again stops it at once", style="dim", markup=False)
        raise
    message = f"stopped; {state} keeps the jobs" if stopped else f"nothing runs on {state} (--state-dir names another)"
    results().print(message, markup=False, soft_wrap=True)
