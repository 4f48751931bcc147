"""StreamingSteps: which steps stream experts, how many of them, and what is learned from each."""

from ktqueue.operators.gpu.handoff import Handoff
from ktqueue.operators.gpu.hybrid_experts import ExpertPlaces
from ktqueue.operators.gpu.streamer import StreamedExperts, Streamer
from ktqueue.operators.gpu.streaming_costs import StreamingCosts

LEVELS = 32  # of the share: a new one has its copies found first


class StreamingSteps:
    """`always`: every step of `least_tokens` or more; else those of them where `costs` say that it pays.

    steps: that streamed.
    """

    def __init__(
        self, streamer: Streamer, costs: StreamingCosts, handoff: Handoff, *, always: bool, least_tokens: int
    ) -> None:
        self._streamer = streamer
        self._costs = costs
        self._handoff = handoff
        self._always = always
        self._least = least_tokens
        self._running: tuple[StreamedExperts, int, float, float] | None = None  # tokens, share, busy seconds before
        self.steps = 0

    @property
    def bytes(self) -> int:
        """Copied so far."""
        return self._streamer.bytes_streamed

    def begin(self, resident: ExpertPlaces, tokens: int, scored: int) -> ExpertPlaces:
        """Where a step of `tokens` finds its experts: `resident`, or a stream. `scored`: tokens of the last layer."""
        self._running = None
        if tokens < self._least or not (self._always or self._costs.pays(tokens)):
            return resident
        share = round(self._costs.share(tokens) * LEVELS) / LEVELS
        if share == 0:
            return resident
        step = self._streamer.begin(resident, share, last_too=scored >= self._least)
        self.steps += 1
        self._running = step, tokens, share, self._handoff.statistics.busy_seconds
        return step

    def after_step(self) -> None:
        """Learn from the step that has just ended, if it streamed. Not from the first: kernels are compiled in it."""
        if self._running is None or self.steps == 1:
            return
        step, tokens, share, before = self._running
        self._running = None
        seconds = step.seconds()
        if seconds is not None and step.layers > 0:
            copy, gpu = seconds
            cpu = (self._handoff.statistics.busy_seconds - before) / step.layers
            self._costs.learn(tokens, share, cpu=cpu, copy=copy, gpu=gpu)
