"""Prompts that share prefixes, and their greedy answers from an engine at which they arrive at random steps."""

import random

from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine

REQUESTS = 64


def make_prompts(vocab: int, longest: int) -> list[list[int]]:
    """64 prompts of 1 to `longest` tokens. Every third prompt begins with a part of an earlier one."""
    noise = random.Random(64)
    prompts: list[list[int]] = []
    for i in range(REQUESTS):
        length = (1, 2, 15, 16, 17, 32, longest)[i] if i < 7 else int(longest ** noise.random())
        head = prompts[noise.randrange(i)][:length] if i % 3 == 2 else []
        prompts.append(head + [noise.randrange(vocab) for _ in range(length - len(head))])
    return prompts


def serve(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    """The engine's answers to prompts that arrive at random steps."""
    noise = random.Random(1)
    arrivals = sorted((noise.randrange(len(prompts)), i) for i in range(len(prompts)))
    found: list[list[int]] = [[] for _ in prompts]
    step = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= step:
            i = arrivals.pop(0)[1]
            engine.add(str(i), prompts[i], sampling)
        for output in engine.step():
            assert output.error is None
            found[int(output.request_id)] += output.token_ids
        step += 1
    engine.check()
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages
    return found
