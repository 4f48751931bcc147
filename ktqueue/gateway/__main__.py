"""`python -m ktqueue.gateway`: a gateway with the settings of its environment, as `ktqueue up` starts it."""

from ktqueue.core import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

import logging
import os
import sys

from ktqueue.core.errors import ConfigError, KtqueueError
from ktqueue.core.listeners import PortTaken
from ktqueue.core.logs import configure_process
from ktqueue.gateway.serve import serve

if __name__ == "__main__":
    try:
        serve(configure_process(os.environ))
    except KtqueueError as error:
        logging.getLogger("ktqueue.gateway").error("%s", error.message)
        is_final = isinstance(error, ConfigError) and not isinstance(error, PortTaken)
        sys.exit(2 if is_final else 1)  # as a worker: after 2 a restart would not help
