"""How fast an engine is without Redis: rows that decode together, and prompts that are read alone.

Prompts are random token ids, so that no two share a prefix and every expert is asked for. Knows no file and no table.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import EngineStats

PARTS = ("schedule", "forward", "sample", "commit")
"""Parts of a step that are timed."""


@dataclass(frozen=True, slots=True)
class Decode:
    """`rows` sequences that decode together, each after a prompt of `prompt_tokens`. Times in seconds.

    `parts`: of a step, on average, by the names in PARTS. `first_token`: from the first of the prompts to each row's
    first token, the slowest row.
    """

    rows: int
    prompt_tokens: int
    tokens: int  # generated while all rows ran
    seconds: float
    step: float  # median
    fastest_step: float
    first_token: float
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together."""
        return self.tokens / self.seconds

    @property
    def host_share(self) -> float:
        """The share of a step in which the model does not run."""
        return 1.0 - self.parts["forward"] / max(sum(self.parts.values()), 1e-12)


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt alone, to its first token; `seconds` is the median of the rounds."""

    tokens: int
    seconds: float
    fastest: float

    @property
    def tokens_per_second(self) -> float:
        """Of the prompt."""
        return self.tokens / self.seconds


def prompts(count: int, tokens: int, vocabulary: int, seed: int = 1) -> list[list[int]]:
    """`count` prompts of random token ids."""
    draw = random.Random(f"{seed}:{count}:{tokens}")
    return [[draw.randrange(vocabulary) for _ in range(tokens)] for _ in range(count)]


def measure_decode(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, **sampling: Any) -> Decode:
    """Read the prompts, then decode until the first row has `tokens` tokens. `sampling`: as SamplingParams; greedy."""
    began = time.perf_counter()
    start(engine, prompts, tokens, sampling)
    first_token = time.perf_counter() - began
    before, generated, full = engine.stats(), 0, True
    moments = [time.perf_counter()]
    while full:
        outputs = engine.step()
        moments.append(time.perf_counter())
        generated += sum(len(output.token_ids) for output in outputs)
        full = not any(output.finish_reason for output in outputs)
    after = engine.stats()
    finish(engine)
    steps = [later - earlier for earlier, later in pairwise(moments)]
    return Decode(
        rows=len(prompts),
        prompt_tokens=len(prompts[0]),
        tokens=generated,
        seconds=moments[-1] - moments[0],
        step=median(steps),
        fastest_step=min(steps),
        first_token=first_token,
        parts={part: (_seconds(after, part) - _seconds(before, part)) / len(steps) for part in PARTS},
    )


def measure_prefill(engine: Engine, prompts: Sequence[Sequence[int]]) -> Prefill:
    """Read the prompts one after the other, each to its first token."""
    seconds = []
    for prompt in prompts:
        began = time.perf_counter()
        start(engine, [prompt], 1, {})
        seconds.append(time.perf_counter() - began)
        finish(engine)
    return Prefill(len(prompts[0]), median(seconds), min(seconds))


def start(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, sampling: Mapping[str, Any]) -> None:
    """Add the rows and step until each has its first token."""
    chosen = {"temperature": 0.0, "seed": 7, "ignore_eos": True, **sampling, "max_tokens": tokens}
    waiting = set()
    for row, prompt in enumerate(prompts):
        engine.add(str(row), prompt, SamplingParams(**chosen))
        waiting.add(str(row))
    while waiting:
        waiting -= {output.request_id for output in engine.step() if output.token_ids}


def finish(engine: Engine) -> None:
    """Step until all is done."""
    while engine.has_work:
        engine.step()


def _seconds(stats: EngineStats, part: str) -> float:
    return float(getattr(stats, f"{part}_seconds"))
