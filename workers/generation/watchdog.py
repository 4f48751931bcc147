"""The last watch over a worker process: ends it when its event loop stands still, whatever holds it. Knows no engine.

A step that hangs is the heartbeat's to see. This is for what lets nothing else in the process run, such as a library
that hangs with the interpreter's lock in hand: the lease lapses by itself then, but the process would stay for ever.
"""

import asyncio
import faulthandler

CHECKS = 8  # looks in that time


async def watch(seconds: float) -> None:
    """Until cancelled: where this loop does not come to run for `seconds`, the process ends with code 1.

    Its stacks go to standard error before. A thread without the interpreter's lock does it, so there is one watch a
    process.
    """
    try:
        while True:
            faulthandler.dump_traceback_later(seconds, exit=True)
            await asyncio.sleep(seconds / CHECKS)
    finally:
        faulthandler.cancel_dump_traceback_later()
