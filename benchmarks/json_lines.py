"""A measured process answers questions: a JSON line each way. Standard library only, because peers' Pythons import it.

A question is {"METHOD": {ARGUMENT: VALUE ...}}.
"""

import asyncio
import json
import sys
from typing import Any


def say(answer: Any) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def answer_questions(target: object) -> None:
    """Call the method of `target` that each question names, and say its result, until standard input ends."""
    for line in sys.stdin:
        [(method, arguments)] = json.loads(line).items()
        say(getattr(target, method)(**arguments))


async def answer_questions_async(target: object) -> None:
    """The same with coroutine methods."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        [(method, arguments)] = json.loads(line).items()
        say(await getattr(target, method)(**arguments))
