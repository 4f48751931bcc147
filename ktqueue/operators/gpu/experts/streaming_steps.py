"""StreamingSteps: which steps stream experts, how many of them, and what is learned from each."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ktqueue.operators.gpu.experts.step import ExpertPlaces
from ktqueue.operators.gpu.experts.streamer import StreamedExperts, Streamer
from ktqueue.operators.gpu.experts.streaming_choice import StreamingChoice
from ktqueue.operators.gpu.experts.streaming_costs import StreamingCosts
from ktqueue.operators.gpu.handoff.handoff import Handoff


@dataclass(frozen=True, slots=True)
class _Running:
    """The step that has begun last, at `begun` seconds. busy: seconds of the CPU before it; streamed: None if it
    streams nothing."""

    tokens: int
    share: float
    begun: float
    busy: float
    streamed: StreamedExperts | None


class StreamingSteps:
    """Long steps, of `least_tokens` or more, stream what `choice` says; what they teach goes to it and to its `costs`.

    steps: that streamed. `clock`: in seconds.
    """

    def __init__(
        self,
        streamer: Streamer,
        costs: StreamingCosts,
        choice: StreamingChoice,
        handoff: Handoff,
        *,
        layers: int,
        least_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._streamer = streamer
        self._costs = costs
        self._choice = choice
        self._handoff = handoff
        self._layers = layers
        self._least = least_tokens
        self._clock = clock
        self._running: _Running | None = None
        self._seen = 0
        self.steps = 0

    @property
    def bytes(self) -> int:
        """Copied so far."""
        return self._streamer.bytes_streamed

    def takes(self, tokens: int) -> bool:
        """Whether a step of so many is a long one."""
        return tokens >= self._least

    def begin(self, resident: ExpertPlaces, tokens: int, scored: int) -> ExpertPlaces:
        """Where a long step finds its experts: `resident`, or a stream. `scored`: tokens of the last layer."""
        share = self._choice.share(tokens)
        streamed = self._streamer.begin(resident, share, last_too=self.takes(scored)) if share > 0 else None
        self.steps += streamed is not None
        busy = self._handoff.statistics.busy_seconds
        self._running = _Running(tokens, share, self._clock(), busy, streamed)
        return resident if streamed is None else streamed

    def after_step(self) -> None:
        """Learn from the step that the device has just finished, if it was a long one. Not from the first: kernels are
        compiled in it, and a worker runs it on tokens that are all alike, which use few experts."""
        running, self._running = self._running, None
        if running is None:
            return
        seconds = self._clock() - running.begun
        parts = (0.0, 0.0) if running.streamed is None else running.streamed.seconds()
        if parts is None:  # it is not done, or an exception has ended it
            return
        self._seen += 1
        if self._seen == 1:
            return
        self._choice.learn(running.tokens, running.share, seconds)
        layers = self._layers if running.streamed is None else running.streamed.layers
        cpu = (self._handoff.statistics.busy_seconds - running.busy) / max(1, layers)
        self._costs.learn(running.tokens, running.share, cpu=cpu, copy=parts[0], gpu=parts[1])
