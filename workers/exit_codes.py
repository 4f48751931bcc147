"""Exit codes of a worker process, and its end. This module imports little: the supervisor must not load torch."""

import logging
import os
import sys
from typing import NoReturn

DRAINED = 0  # it was asked to stop and has no job left
BROKEN = 1  # it failed; a new process may succeed
UNUSABLE = 2  # settings, model or rules are wrong, so a restart would not help


def leave(code: int) -> NoReturn:
    """End the process now, without finalising the interpreter.

    With torch that takes seconds, and a thread that hangs in a device call would prevent it altogether.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
