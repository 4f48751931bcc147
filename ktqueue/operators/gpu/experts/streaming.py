"""Streaming: during long steps, experts that are not in GPU memory are copied there layer by layer.

The GPU memory for this has two areas. While the experts of one layer are in use, those of the next layer arrive in the
other area. The CPU computes the experts that are not copied, at the same time: those that are used least. The tables
used here are separate from the pool's, so steps that do not stream see no difference.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from ktqueue.operators import native
from ktqueue.operators.gpu.copy_stream import Copy, CopyStream, Mark
from ktqueue.operators.gpu.experts.pool import ABSENT, ExpertPool
from ktqueue.operators.gpu.experts.step import ExpertLocations, ExpertResidency, RoutedLayer
from ktqueue.operators.gpu.experts.streaming_choice import StreamingChoice, StreamingCosts
from ktqueue.operators.gpu.experts.use_order import UseOrder
from ktqueue.operators.gpu.handoff.handoff import Handoff

AREAS = 2
MAX_COPY_LISTS = 12  # that are remembered for each layer: preparing one takes half a millisecond, and it has 0.1 MB
Numbers = npt.NDArray[np.int64]


def area_bytes(layers: Sequence[RoutedLayer], slots: Sequence[int]) -> int:
    """Size of one area: room for all experts of any one layer that have no slot."""
    return max(
        ((layer.experts - count) * layer.record.bytes for count, layer in zip(slots, layers, strict=True)), default=0
    )


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What is streamed, for one version of the pool and one of the order of uses.

    For each layer: the number of experts, whether some of the others must be computed by the CPU, and the copies.
    """

    versions: tuple[int, int]
    counts: tuple[int, ...]
    on_cpu: list[bool]
    copies: list[list[Copy]]


class Streamer(ExpertResidency):
    """Streams experts of `layers`, in one step at a time, and says where the experts are in that step.

    `pool` holds their slots and AREAS * `area_bytes` of staging memory. order: which experts are copied first.
    """

    sends_rows_late = True

    def __init__(self, layers: Sequence[RoutedLayer], pool: ExpertPool, copies: CopyStream, order: UseOrder) -> None:
        self.memory = pool.memory
        self._layers = layers
        self._pool = pool
        self.order = order
        self._copies = copies
        self._area = area_bytes(layers, pool.slots)
        experts = pool.host.shape[1]
        # [layers, 2, experts]: gate_up and down are apart, so that one copy brings the parts of several experts.
        self._tables = torch.full((len(layers), 2, experts), ABSENT, dtype=torch.int64, device=copies.device)
        self._copy_lists: list[dict[bytes, list[Copy]]] = [{} for _ in layers]  # by the experts' numbers
        self._plan = StreamPlan((-1, -1), (), [], [])
        self._freed: list[Mark | None] = [None] * AREAS  # after it nothing reads the area
        self.bytes_streamed = 0

    def begin(self, resident: ExpertResidency, share: float, *, last_too: bool) -> Self:
        """Start a step that streams `share` (from 0 to 1) of the experts that are not in GPU memory.

        `last_too`: also those of the last layer. `resident`: where steps that stream nothing find the experts.
        """
        layers = len(self._layers) - (not last_too)
        counts = tuple(
            round(share * (layer.experts - slots)) if index < layers else 0
            for index, (layer, slots) in enumerate(zip(self._layers, self._pool.slots, strict=True))
        )
        if (self._plan.versions, self._plan.counts) != (self._versions(), counts):
            self._plan = self._make_plan(counts)
        self._copies.wait_for(self._copies.mark_step())  # earlier short steps may have fetched experts to the areas
        self._resident = resident
        self._arriving: dict[int, Mark] = {}
        self._copy_spans: list[tuple[Mark, Mark]] = []
        self._gpu_spans: list[tuple[Mark, Mark]] = []  # from the end of one layer's experts to the next layer's
        self._last_done: Mark | None = None
        for layer in range(AREAS):
            self._load(layer)
        return self

    def locations(self, layer: int) -> ExpertLocations:
        """See ExpertResidency."""
        if self._plan.counts[layer] == 0:
            return self._resident.locations(layer)
        gate_up, down = self._tables[layer, :, : self._layers[layer].experts]
        return ExpertLocations(gate_up, down, on_gpu=True, on_cpu=self._plan.on_cpu[layer])

    def use_counts(self, layer: int) -> torch.Tensor | None:
        """See ExpertResidency."""
        return self._resident.use_counts(layer)

    def wait_for_arrival(self, layer: int) -> None:
        """See ExpertResidency."""
        if self._last_done is not None:
            self._gpu_spans.append((self._last_done, self._copies.mark_step()))
        if layer in self._arriving:
            self._copies.let_steps_wait_for(self._arriving.pop(layer))

    def release(self, layer: int) -> None:
        """See ExpertResidency."""
        self._freed[layer % AREAS] = self._copies.mark_step()
        self._load(layer + AREAS)

    def layer_done(self, layer: int) -> None:
        """See ExpertResidency."""
        self._last_done = self._copies.mark_step()

    @property
    def layers(self) -> int:
        """Number of layers whose experts are streamed in this step."""
        return sum(count > 0 for count in self._plan.counts)

    @property
    def needs_cpu(self) -> bool:
        """Whether the CPU computes experts of a layer whose other experts are streamed."""
        return any(self._plan.on_cpu)

    def improve_order(self) -> None:
        """Let the next step copy the experts that were used most."""
        self.order.improve(self._pool.is_absent())

    def seconds(self) -> tuple[float, float] | None:
        """Mean seconds for a layer: of its copies, and of the GPU between the experts of the layer before and its own;
        0: not known. None if the step is not finished."""
        if self._last_done is None or not self._last_done.passed():
            return None
        return _mean(self._copy_spans), _mean(self._gpu_spans)

    def _load(self, layer: int) -> None:
        """Copy the experts of a layer as soon as its area is free."""
        if layer >= len(self._layers) or self._plan.counts[layer] == 0:
            return
        freed = self._freed[layer % AREAS]
        if freed is not None:
            self._copies.wait_for(freed)
        begun = self._copies.mark()
        self._copies.copy(self._plan.copies[layer])
        self.bytes_streamed += sum(target.nbytes for _, target in self._plan.copies[layer])
        self._arriving[layer] = self._copies.mark()
        self._copy_spans.append((begun, self._arriving[layer]))

    def _make_plan(self, counts: tuple[int, ...]) -> StreamPlan:
        """Choose the absent experts that are used most, lay them out in the areas and fill the tables."""
        tables = np.stack([self._pool.host, self._pool.host], axis=1)
        is_absent = self._pool.is_absent()
        copies: list[list[Copy]] = []
        on_cpu: list[bool] = []
        for index, (layer, count) in enumerate(zip(self._layers, counts, strict=True)):
            chosen = self.order.first(index, count, is_absent)
            on_cpu.append(count < int(is_absent[index, : layer.experts].sum()))
            start = self._pool.staging_start + index % AREAS * self._area
            record, order = layer.record, np.arange(len(chosen))
            down_start = start + len(chosen) * record.down_start
            tables[index, 0, chosen] = start + order * record.down_start
            # The kernel of `down` adds down_start to the beginning of a record, so it is subtracted here.
            tables[index, 1, chosen] = down_start + order * (record.bytes - record.down_start) - record.down_start
            copies.append(self._copy_list(index, chosen, start, down_start))
        self._tables.copy_(self._copies.staged(torch.from_numpy(tables)), non_blocking=True)
        return StreamPlan(self._versions(), counts, on_cpu, copies)

    def _versions(self) -> tuple[int, int]:
        return self._pool.version, self.order.version

    def _copy_list(self, index: int, experts: Numbers, gate_up: int, down: int) -> list[Copy]:
        """Copies of the experts' gate_up parts to offset `gate_up` and of their down parts to `down`, back to back."""
        known, key = self._copy_lists[index], experts.tobytes()
        copies = known.pop(key, None)
        if copies is None:
            copies = self._make_copies(self._layers[index], experts.tolist(), gate_up, down)
        if len(known) >= MAX_COPY_LISTS:
            known.pop(next(iter(known)))  # the one that was not used for longest
        known[key] = copies
        return copies

    def _make_copies(self, layer: RoutedLayer, experts: list[int], gate_up: int, down: int) -> list[Copy]:
        gate_up_pieces: list[tuple[int, int, int]] = []  # (address, offset, bytes)
        down_pieces: list[tuple[int, int, int]] = []
        for expert in experts:
            done = 0
            for address, size in layer.packed.ranges(expert):
                if done < layer.record.down_start:
                    gate_up_pieces.append((address, gate_up, size))
                    gate_up += size
                else:
                    down_pieces.append((address, down, size))
                    down += size
                done += size
        runs: list[tuple[int, int, int]] = []
        for address, offset, size in (*gate_up_pieces, *down_pieces):
            if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (address, offset):
                address, offset, size = runs[-1][0], runs[-1][1], runs.pop()[2] + size
            runs.append((address, offset, size))
        memory = self._pool.memory
        return [(native.host_bytes(address, size), memory[offset : offset + size]) for address, offset, size in runs]


@dataclass(frozen=True, slots=True)
class _LongStep:
    """The current long step. begun: its start in seconds; cpu_busy: seconds that the CPU's experts had worked before
    it; streamed: None if it streams nothing."""

    tokens: int
    share: float
    begun: float
    cpu_busy: float
    streamed: Streamer | None


class StreamingSteps:
    """Lets steps of `least_tokens` tokens or more stream the share that `choice` picks, and learns from their times.

    steps: number of steps that streamed. `clock` returns seconds.
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
        self._least_tokens = least_tokens
        self._clock = clock
        self._current: _LongStep | None = None
        self._has_finished_one = self._streamed_all = False
        self._order_version = streamer.order.version
        self.steps = 0

    @property
    def bytes(self) -> int:
        """Bytes copied so far."""
        return self._streamer.bytes_streamed

    def is_long(self, tokens: int) -> bool:
        """Whether a step of `tokens` tokens may stream."""
        return tokens >= self._least_tokens

    def begin(self, resident: ExpertResidency, tokens: int, scored: int) -> ExpertResidency:
        """Where a long step finds its experts: `resident`, or a stream. `scored`: tokens of the last layer."""
        order = self._streamer.order
        if self._has_finished_one:
            self._streamer.improve_order()
        if order.version != self._order_version:
            self._order_version = order.version
            self._choice.forget_splits()
        self._costs.left = order.left
        share = self._choice.share(tokens)
        streamed = self._streamer.begin(resident, share, last_too=self.is_long(scored)) if share > 0 else None
        self.steps += streamed is not None
        cpu_busy = self._handoff.statistics.busy_seconds
        self._current = _LongStep(tokens, share, self._clock(), cpu_busy, streamed)
        return resident if streamed is None else streamed

    def begin_all(self, resident: ExpertResidency) -> ExpertResidency:
        """Where a step finds its experts that streams all of them, so that the CPU is free. Nothing is learned.

        No expert may be on its way to a slot."""
        self.steps += 1
        self._streamed_all = True
        streamed = self._streamer.begin(resident, 1.0, last_too=True)
        assert not streamed.needs_cpu, "an expert is neither in a slot nor streamed"
        return streamed

    def after_step(self) -> bool:
        """Learn from the step that the device has just finished, if it was a long one. Returns whether it was, or one
        of `begin_all` since the last call.

        The first one is ignored: it compiles kernels, and a worker runs it on equal tokens, which use few experts.
        """
        step, self._current = self._current, None
        streamed_all, self._streamed_all = self._streamed_all, False
        if step is None:
            return streamed_all
        seconds = self._clock() - step.begun
        parts = (0.0, 0.0) if step.streamed is None else step.streamed.seconds()
        if parts is None:  # an exception ended the step early
            return True
        if not self._has_finished_one:
            self._has_finished_one = True
            return True
        self._choice.learn(step.tokens, step.share, seconds)
        layers = self._layers if step.streamed is None else step.streamed.layers
        cpu = (self._handoff.statistics.busy_seconds - step.cpu_busy) / max(1, layers)
        self._costs.learn(step.tokens, step.share, cpu=cpu, copy=parts[0], gpu=parts[1])
        return True


def _mean(spans: list[tuple[Mark, Mark]]) -> float:
    return sum(end.seconds_since(begin) for begin, end in spans) / len(spans) if spans else 0.0
