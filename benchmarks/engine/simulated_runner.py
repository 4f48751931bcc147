"""A runner that computes nothing: its steps take virtual time, as on the host of an H200."""

import random
from bisect import bisect_left
from contextlib import AbstractContextManager, nullcontext

import torch

from benchmarks.engine.virtual_clock import VirtualClock
from ktqueue.engine.batch import Batch
from ktqueue.engine.logits import Logits
from ktqueue.engine.runner import DeviceTokens, LaunchedStep

STEPS = [(1, 0.0115), (2, 0.02), (4, 0.036), (8, 0.07), (20, 0.135), (64, 0.16), (128, 0.186), (150, 0.21),
         (315, 0.24), (512, 0.25), (1024, 0.265), (2048, 0.345), (8192, 0.355)]  # fmt: skip
"""Tokens and seconds of a step: Qwen3-30B-A3B in Q4_K_M with experts in host memory, from a profile of commit 5143b90b
on an H200 host."""
SCORED_SECONDS = 15e-6  # more for each row of logits
SCATTER = 0.97, 1.06  # least and most that a step takes, by what the curve says
BETWEEN_SECONDS, BETWEEN_ROW_SECONDS = 0.003, 10e-6  # of the host, after a step and for each of its outputs
CPU_RATE, BUS_RATE = 0.75, 0.42  # of a prompt beside an overlapped step, by a profile of commit 65b778e1


class Vocabulary:
    """Token 15 ends a sequence, and all others are a letter."""

    size = 16
    eos_token_ids = frozenset({15})

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.eos_token_ids else b"a"

    special_token_bytes = token_bytes


class OverlappedStep:
    """A LaunchedStep, of which `clock` knows how much is left."""

    def __init__(self, clock: VirtualClock, logits: torch.Tensor, seconds: float) -> None:
        self._clock = clock
        self._logits = logits
        self.logits: Logits | None = logits
        clock.left = seconds

    @property
    def is_done(self) -> bool:
        return self._clock.left <= 0.0

    def keep_ahead(self, *, until_idle: bool = False) -> None:
        """See LaunchedStep. All is launched."""

    def finish(self) -> Logits:
        self._clock.sleep(self._clock.left)
        return self._logits


class SimulatedRunner:
    """An OverlappingRunner. `cpu_rate`, `bus_rate`: speed of a step beside an overlapped one, and of the latter, by
    the speed that each has alone. `longer`: time of an overlapped step alone, by that of another of its size."""

    replayed = 0

    def __init__(
        self, clock: VirtualClock, cpu_rate: float, bus_rate: float, longer: float, *, may_overlap: bool
    ) -> None:
        self.may_overlap = may_overlap
        self._clock = clock
        self._rates, self._longer = (cpu_rate, bus_rate), longer
        self._draw = random.Random(1)

    def execute(self, batch: Batch, tokens: DeviceTokens | None = None) -> torch.Tensor:
        self._clock.compute(self._seconds(batch), *self._rates)
        return _logits(batch)

    def begin(self, batch: Batch) -> LaunchedStep:
        return OverlappedStep(self._clock, _logits(batch), self._longer * self._seconds(batch))

    def execute_beside(self, batch: Batch, overlapped: LaunchedStep) -> torch.Tensor:
        return self.execute(batch)

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def prepare(self, batch: Batch) -> bool:
        """See Runner. Nothing is prepared."""
        return False

    def wait(self) -> None:
        """See Runner."""

    def learn(self, seconds: float) -> None:
        """See Runner."""

    def end_overlap(self) -> None:
        """See OverlappingRunner."""

    def _seconds(self, batch: Batch) -> float:
        seconds = step_seconds(batch.input_ids.shape[-1]) + SCORED_SECONDS * len(batch.scored)
        return seconds * self._draw.uniform(*SCATTER)


def step_seconds(tokens: int) -> float:
    """What a step of so many tokens takes: a line between the points of STEPS."""
    place = min(max(1, bisect_left(STEPS, (tokens, 0.0))), len(STEPS) - 1)
    (low, fast), (high, slow) = STEPS[place - 1 : place + 1]
    return fast + (slow - fast) * (tokens - low) / (high - low)


def between_seconds(outputs: int) -> float:
    """What the host needs after a step, before the next one begins."""
    return BETWEEN_SECONDS * (outputs > 0) + BETWEEN_ROW_SECONDS * outputs


def _logits(batch: Batch) -> torch.Tensor:
    return torch.zeros(len(batch.scored), Vocabulary.size)
