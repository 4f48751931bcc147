"""`python -m ktqueue.gateway`: a gateway with the settings of its environment, as `ktqueue up` starts it."""

import os

from ktqueue.core.logs import configure_process
from ktqueue.gateway.serve import serve

if __name__ == "__main__":
    serve(configure_process(os.environ))
