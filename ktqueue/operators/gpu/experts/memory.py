"""ExpertMemory: everything that the routed experts of a model need on a device, from the first step to the last."""

import sys
from collections.abc import Sequence

import numpy as np
import torch

from ktqueue.core.expert_work import ExpertUses, ExpertWork
from ktqueue.operators.gpu.copy_stream import CopyStream
from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.gpu.experts.decoding import DecodedExperts
from ktqueue.operators.gpu.experts.fetching import FetchedExperts, FetchedShares
from ktqueue.operators.gpu.experts.placement import Placement
from ktqueue.operators.gpu.experts.pool import ExpertPool, slots_that_fit
from ktqueue.operators.gpu.experts.probes import measure_costs, measure_shares
from ktqueue.operators.gpu.experts.step import ExpertLocations, ExpertResidency, RoutedLayer, StepExperts
from ktqueue.operators.gpu.experts.step_counts import StepCounts
from ktqueue.operators.gpu.experts.streaming import AREAS, Streamer, StreamingSteps, area_bytes
from ktqueue.operators.gpu.experts.streaming_choice import SHARES, SOME_SHARES, StreamingChoice
from ktqueue.operators.gpu.experts.warpgroups import prepare_warpgroups
from ktqueue.operators.gpu.handoff.handoff import Handoff
from ktqueue.operators.gpu.kernels.expert_int8 import down_counters
from ktqueue.operators.gpu.kernels.linear import FEW_ROWS
from ktqueue.operators.gpu.settings import GpuSettings, Trials
from ktqueue.operators.gpu.side_stream import SideStream

_ALWAYS_CAPTURED, _CAPTURED_SHARE = 2048, 0.01


def captured_tokens(hidden: int, experts_per_token: int, device_bytes: int) -> int:
    """Tokens of the largest step with prompts that is captured on a GPU with so much memory: 2,048, or more if their
    tensors take at most a hundredth of it. These are ten float32 rows of a token, and one of each of its experts."""
    token_bytes = 4 * hidden * (10 + experts_per_token)
    return max(_ALWAYS_CAPTURED, int(_CAPTURED_SHARE * device_bytes) // token_bytes)


class ResidentExperts(ExpertResidency):
    """Where the experts are during steps that copy none: in the slots of the pool, or on the CPU."""

    def __init__(self, pool: ExpertPool, layers: list[RoutedLayer], placement: Placement | None) -> None:
        self.memory = pool.memory
        self._placement = placement
        on_gpu = any(pool.slots)
        on_cpu = any(count < layer.experts for count, layer in zip(pool.slots, layers, strict=True))
        self._experts = [layer.experts for layer in layers]
        rows = [pool.offsets[index, :experts] for index, experts in enumerate(self._experts)]
        firsts = [None if on_cpu else pool.offsets_of_slots(index)[0] for index in range(len(layers))]
        self._locations = [
            ExpertLocations(row, row, on_gpu, on_cpu, first=first) for row, first in zip(rows, firsts, strict=True)
        ]
        shape = len(layers), max(self._experts, default=0)
        self._recent = None if on_cpu else torch.zeros(shape, dtype=torch.int32, device=pool.memory.device)

    def locations(self, layer: int) -> ExpertLocations:
        """See ExpertResidency."""
        return self._locations[layer]

    def use_counts(self, layer: int) -> torch.Tensor | None:
        """See ExpertResidency."""
        return None if self._placement is None else self._placement.counts[layer, : self._experts[layer]]

    def recent_uses(self, layer: int) -> torch.Tensor | None:
        """See ExpertResidency."""
        return None if self._recent is None else self._recent[layer, : self._experts[layer]]


class ExpertMemory:
    """The experts of `layers`, the layers with routed experts. Without any, all methods do nothing.

    handoff: to the CPU's experts; None if all experts are in GPU memory. The argument `handoff`: one of other layers
    that never run at the same time, which is shared.
    """

    def __init__(
        self,
        layers: list[RoutedLayer],
        hidden: int,
        dtype: torch.dtype,
        device: str,
        settings: GpuSettings,
        trials: Trials,
        *,
        handoff: Handoff | None = None,
    ) -> None:
        self._layers = layers
        slots = slots_that_fit(layers, settings.expert_memory_bytes)
        on_gpu, on_cpu = any(slots), slots != [layer.experts for layer in layers]
        streams = on_cpu and settings.expert_streaming != "off"
        self._copies = copies = CopyStream(device)
        pinned = streams or (on_gpu and on_cpu)
        for layer in layers if pinned else ():
            pinned &= copies.pin(piece for expert in range(layer.experts) for piece in layer.packed.ranges(expert))
        self._pool = ExpertPool(layers, slots, AREAS * area_bytes(layers, slots) if streams else 0, copies)
        self._placement = Placement(layers, self._pool, copies) if on_cpu and (on_gpu or streams) else None
        self._resident = ResidentExperts(self._pool, layers, self._placement)
        self._beside = SideStream(device) if trials.shared_beside_experts else None
        self._counters = torch.zeros(down_counters(FEW_ROWS, hidden), dtype=torch.int32, device=device)
        self._warpgroups = prepare_warpgroups(layers, self._pool.memory, dtype, settings.max_tokens, trials)
        self._counts = StepCounts(layers, self._pool, self._fetched_experts)
        others = [layer for index, layer in enumerate(layers) if index not in self._warpgroups]
        self._decoded = DecodedExperts.prepare(
            others, self._pool.memory, dtype, settings.max_tokens, least_tokens=settings.decode_experts_from
        )
        self.handoff: Handoff | None = None
        self._max_tokens, self._hidden = settings.max_tokens, hidden
        self._shared_handoff = handoff
        self._first = 0  # number of the first layer in the hand-off
        self.choices: torch.Tensor | None = None
        self._streaming: StreamingSteps | None = None
        self._fetched: FetchedExperts | None = None
        self._is_overlapped = False
        self.may_overlap = streams and pinned
        """Whether a step can leave the CPU's experts to others: see `step`."""
        if on_cpu:
            self.handoff = self._connect_cpu(hidden, device, settings)
        # With host functions a thread of CUDA runs the task, and it must return so that the stream continues.
        self._predicts = (
            settings.expert_prefetch and self.handoff is not None and self.handoff.method != "host_functions"
        )
        if streams and self.handoff is not None and self._placement is not None:
            order = self._placement.order
            costs = measure_costs(layers, self._pool, copies, settings.max_tokens)
            costs.left = order.left
            self._streaming = StreamingSteps(
                Streamer(layers, self._pool, copies, order),
                costs,
                StreamingChoice(costs, len(layers), shares=_streaming_shares(settings)),
                self.handoff,
                layers=len(layers),
                least_tokens=settings.streaming_tokens,
            )
            if pinned:
                self._fetched = self._prepare_fetching(hidden, dtype, settings)

    def _connect_cpu(self, hidden: int, device: str, settings: GpuSettings) -> Handoff:
        experts_per_token = max(layer.experts_per_token for layer in self._layers)
        handoff = self._shared_handoff
        if handoff is None:
            handoff = Handoff(hidden, experts_per_token, settings.max_tokens, device, method=settings.handoff)
        numbers = [handoff.add_layer(layer.packed) for layer in self._layers]
        self._first = numbers[0]
        return handoff

    def _prepare_fetching(self, hidden: int, dtype: torch.dtype, settings: GpuSettings) -> FetchedExperts:
        """Decide how much short steps fetch."""
        uncounted = ResidentExperts(self._pool, self._layers, None)
        fetched = FetchedExperts(self._layers, self._pool, self._copies, uncounted)

        def make_step(share: float) -> StepExperts:
            fetched.shares = FetchedShares(share, share)
            return StepExperts(self._layers, fetched if share > 0 else uncounted, self.handoff)

        shares = FetchedShares(0.0, 0.0)
        if settings.fetched_shares is not None:
            shares = FetchedShares(*settings.fetched_shares)
        elif self._copies.on_gpu:
            device, slots = self._copies.device, self._pool.slots
            shares = measure_shares(make_step, self._layers, slots, hidden, dtype, device, settings.max_tokens)
        fetched.shares, fetched.resident = shares, self._resident
        return fetched

    def _residency_of_short_step(self, tokens: int) -> ExpertResidency:
        """Where the experts are in a step of `tokens` tokens that does not stream."""
        if self._fetched is None or self._fetched.shares.of(tokens) == 0:
            return self._resident
        return self._fetched

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return self._pool.bytes + (0 if self._decoded is None else self._decoded.memory.nbytes)

    def statistics(self) -> dict[str, float]:
        """See GpuDecoder.statistics."""
        placement, streaming = self._placement, self._streaming
        shares = self._fetched.shares if self._fetched else FetchedShares(0.0, 0.0)
        known: dict[str, float] = {
            "experts": sum(layer.experts for layer in self._layers),
            "experts_on_gpu": sum(self._pool.slots),
            "expert_bytes": sum(layer.experts * layer.record.bytes for layer in self._layers),
            "expert_uses": placement.uses if placement else 0,
            "expert_uses_on_gpu": placement.uses_on_gpu if placement else 0,
            "expert_moves": placement.moves if placement else 0,
            "expert_streamed_steps": streaming.steps if streaming else 0,
            "expert_streamed_bytes": streaming.bytes if streaming else 0,
            "expert_fetched_share_one": shares.one_token,
            "expert_fetched_share_several": shares.several_tokens,
        }
        if placement is not None and any(self._pool.slots) and placement.hit_rate is not None:
            known["expert_hit_rate"] = placement.hit_rate
        if placement is not None and placement.observe is not None:
            known |= {
                "expert_gpu_experts": self._counts.gpu_experts,
                "expert_fetched_bytes": self._counts.fetched_bytes,
            }
        if self.handoff is not None:
            cpu = self.handoff.statistics
            known |= {"expert_predictions": cpu.predicted, "expert_prediction_hits": cpu.predicted_used}
        return known

    def work(self) -> ExpertWork:
        """See CountsExperts."""
        streamed = self._streaming.bytes if self._streaming else 0
        if self.handoff is None:
            return ExpertWork(bus_bytes=streamed)
        cpu, counts = self.handoff.statistics, self._counts
        uses = (self._placement.uses, self._placement.uses_on_gpu) if self._placement else (0, 0)
        cpu_work = cpu.tasks, cpu.experts_used, cpu.bytes, cpu.busy_seconds
        return ExpertWork(*cpu_work, streamed, *uses, counts.gpu_experts, counts.fetched_bytes)

    def count_each_step(self) -> None:
        """See PlacesExperts."""
        if self._placement is not None:
            self._placement.read_each_step()
            self._placement.observe = self._counts.observe

    def _fetched_experts(self, layer: int, tokens: int, absent: int) -> int:
        return 0 if self._fetched is None else self._fetched.fetched(layer, tokens, absent)

    def uses(self) -> ExpertUses | None:
        """See GpuDecoder.expert_uses."""
        if self._placement is not None:
            counts = self._placement.known_counts
            return [counts[index, : layer.experts].tolist() for index, layer in enumerate(self._layers)]
        return None if self.handoff is None else self.handoff.uses[self._first :][: len(self._layers)]

    @property
    def depends_on_uses(self) -> bool:
        """See PlacesExperts."""
        return self._placement is not None

    def place(self, uses: ExpertUses) -> None:
        """See PlacesExperts."""
        experts = [layer.experts for layer in self._layers]
        if [len(layer) for layer in uses] != experts:
            raise ValueError(f"uses must be of {len(experts)} layers of {max(experts)} experts at most")
        if self._placement is not None:
            table = np.zeros(self._pool.host.shape)
            for row, layer in zip(table, uses, strict=True):
                row[: len(layer)] = layer
            self._placement.place(table)

    def step(self, tokens: int, scored: int, *, decodes: bool, captured: bool, overlapped: bool = False) -> StepExperts:
        """The experts for a step of `tokens` tokens.

        scored: tokens that reach the experts of the last layer. decodes: each token is the only one of its row, and is
        scored. captured: the step is captured in a graph, so it must not differ from other steps of its size.
        overlapped: other steps run before this one is done. So it streams all experts, and until `end_overlap` the
        others have the CPU and no memory for experts.
        """
        decoded = None if self._decoded is None or (captured and decodes) else self._decoded.memory_for
        if overlapped:
            assert self._streaming is not None and self.may_overlap, "this step needs the CPU"
            self._is_overlapped = True
            if self._fetched is not None:
                self._fetched.allowed.zero_()
            if self._placement is not None:
                self._placement.finish_moves()
            # It has no way to the CPU, so that two streams never use the hand-off at the same time.
            residency = self._streaming.begin_all(self._resident)
            return StepExperts(self._layers, residency, None, decoded=decoded, warpgroups=self._warpgroups)
        residency = short = self._residency_of_short_step(tokens)
        if self._is_overlapped:
            residency, decoded = self._resident, None
        elif self._streaming is not None and not captured and self.streams(tokens):
            residency = self._streaming.begin(self._resident, tokens, scored)
        predicts = decodes and self._predicts and residency is short
        return StepExperts(
            self._layers,
            residency,
            self.handoff,
            first=self._first,
            predicts=predicts,
            decoded=decoded,
            choices=self.choices,
            beside=self._beside if decodes else None,
            counters=self._counters,
            warpgroups=self._warpgroups,
        )

    @property
    def most_captured_tokens(self) -> int:
        """Tokens of the largest step with prompts that may be captured: see `captured_tokens`. 0: none, because the CPU
        has some of the experts."""
        if self.handoff is not None:
            return 0
        device = self._pool.memory.device
        total = torch.cuda.get_device_properties(device).total_memory if is_gpu(device) else sys.maxsize
        slots = max((layer.experts_per_token for layer in self._layers), default=0)  # a dense model has no such layers
        return min(self._max_tokens, captured_tokens(self._hidden, slots, total))

    def streams(self, tokens: int) -> bool:
        """Whether a step of `tokens` tokens that is not captured may stream."""
        return self._streaming is not None and self._streaming.is_long(tokens)

    @torch.inference_mode()
    def end_overlap(self) -> None:
        """Note that the overlapped step and all others are done, or that it was given up."""
        self._copies.finish()  # a step that was given up has not waited for them, and others fetch to their memory
        self._is_overlapped = False
        if self._fetched is not None:
            self._fetched.allowed.fill_(1)

    @torch.inference_mode()
    def after_step(self) -> None:
        """See GpuDecoder.after_step."""
        if self.handoff is not None:
            self.handoff.check()
        if self._is_overlapped:  # its tables must stay as they are
            return
        is_long = self._streaming is not None and self._streaming.after_step()
        if self._placement is not None:
            self._placement.after_step(is_long=is_long)

    def close(self) -> None:
        """Stop the thread of the CPU's experts, unless it is shared, and unpin their memory."""
        if self.handoff is not None and self.handoff is not self._shared_handoff:
            self.handoff.close()
        self._copies.close()


def _streaming_shares(settings: GpuSettings) -> Sequence[float]:
    """The shares that long steps may stream."""
    if settings.streamed_share is not None:
        return (settings.streamed_share,)
    return SOME_SHARES if settings.expert_streaming == "on" else SHARES
