"""ExpertMemory: everything that the routed experts of a model need on a device, from the first step to the last."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ktqueue.operators.gpu.copy_stream import CopyStream
from ktqueue.operators.gpu.experts.fetch_probe import measure_shares
from ktqueue.operators.gpu.experts.fetching import FetchedExperts, FetchedShares, Fetcher
from ktqueue.operators.gpu.experts.placement import Placement
from ktqueue.operators.gpu.experts.pool import ExpertPool, slots_that_fit
from ktqueue.operators.gpu.experts.step import ExpertPlaces, Places, RoutedLayer, StepExperts
from ktqueue.operators.gpu.experts.streamer import AREAS, Streamer, area_bytes
from ktqueue.operators.gpu.experts.streaming_choice import StreamingChoice
from ktqueue.operators.gpu.experts.streaming_probe import measure_costs
from ktqueue.operators.gpu.experts.streaming_steps import StreamingSteps
from ktqueue.operators.gpu.handoff.handoff import Handoff
from ktqueue.operators.gpu.settings import GpuSettings


@dataclass(frozen=True, slots=True)
class ExpertStatistics:
    """Since the start. on_gpu: experts that have a place in GPU memory, of `experts`; hit_rate: share of late uses that
    found theirs there, None: not known; moves: experts that came in for others; streamed_steps, streamed_bytes: what
    long steps copied beside; fetched_shares: of the experts that short steps use and the GPU has not, what comes."""

    experts: int
    on_gpu: int
    hit_rate: float | None
    moves: int
    streamed_steps: int
    streamed_bytes: int
    fetched_shares: FetchedShares


class ResidentExperts:
    """ExpertPlaces of all steps to which no expert comes: they are where the pool has them."""

    def __init__(self, pool: ExpertPool, layers: list[RoutedLayer], placement: Placement | None) -> None:
        self.memory = pool.memory
        self._placement = placement
        on_gpu = any(pool.slots)
        on_cpu = any(count < layer.experts for count, layer in zip(pool.slots, layers, strict=True))
        self._experts = [layer.experts for layer in layers]
        self._places = [pool.places(index, on_gpu=on_gpu, on_cpu=on_cpu) for index in range(len(layers))]

    def places(self, layer: int) -> Places:
        """See ExpertPlaces."""
        return self._places[layer]

    def counts(self, layer: int) -> torch.Tensor | None:
        """See ExpertPlaces."""
        return None if self._placement is None else self._placement.counts[layer, : self._experts[layer]]

    def choose(self, layer: int, ids: torch.Tensor, cpu_ids: torch.Tensor) -> None:
        """It is known before."""

    def arrive(self, layer: int) -> None:
        """They are there."""

    def leave(self, layer: int) -> None:
        """They stay."""

    def settle(self, layer: int) -> None:
        """It is as for every other layer."""


class ExpertMemory:
    """For `layers`, those with routed experts; of none, all methods do nothing."""

    def __init__(
        self, layers: list[RoutedLayer], hidden: int, dtype: torch.dtype, device: str, settings: GpuSettings
    ) -> None:
        self._layers = layers
        slots = slots_that_fit(layers, settings.expert_memory_bytes)
        on_gpu, on_cpu = any(slots), slots != [layer.experts for layer in layers]
        streams = on_cpu and settings.expert_streaming != "off"
        self._copies = copies = CopyStream(device)
        pinned = streams or (on_gpu and on_cpu)
        for layer in layers if pinned else ():
            pinned &= copies.pin(one for expert in range(layer.experts) for one in layer.packed.ranges(expert))
        self._pool = ExpertPool(layers, slots, AREAS * area_bytes(layers, slots) if streams else 0, copies)
        self._placement = Placement(layers, self._pool, copies) if on_gpu and on_cpu else None
        self._resident = ResidentExperts(self._pool, layers, self._placement)
        self._handoff: Handoff | None = None
        self._streaming: StreamingSteps | None = None
        self._fetched: FetchedExperts | None = None
        self._shares = FetchedShares(0.0, 0.0)
        self._defers = on_cpu and settings.deferred_experts > 0
        self._predicts = False
        if on_cpu:
            most = max(layer.experts_per_token for layer in layers)
            self._handoff = Handoff(
                hidden,
                most,
                settings.max_tokens,
                device,
                method=settings.handoff,
                deferred_experts=settings.deferred_experts,
            )
            for layer in layers:
                self._handoff.add_layer(layer.packed)
            # CUDA's own thread has to go on with the stream.
            self._predicts = settings.expert_prefetch and self._handoff.method != "host_functions"
        if streams and self._handoff is not None:
            costs = measure_costs(layers, self._pool, copies, settings.max_tokens)
            streamer = Streamer(layers, self._pool, copies)
            choice = StreamingChoice(costs, len(layers), always=settings.expert_streaming == "on")
            self._streaming = StreamingSteps(
                streamer, costs, choice, self._handoff, layers=len(layers), least_tokens=settings.streaming_tokens
            )
            if pinned:
                self._fetched = self._fetch(hidden, dtype, settings)

    def _fetch(self, hidden: int, dtype: torch.dtype, settings: GpuSettings) -> FetchedExperts:
        """For short steps, once it is known how much comes to them."""
        fetcher, plain = (
            Fetcher(self._layers, self._pool, self._copies),
            ResidentExperts(self._pool, self._layers, None),
        )

        def step(share: float) -> StepExperts:
            fetcher.shares = FetchedShares(share, share)
            where = FetchedExperts(fetcher, plain) if share > 0 else plain
            return StepExperts(self._layers, where, self._handoff)

        if settings.fetched_share is None:
            self._shares = measure_shares(step, self._layers, hidden, dtype, self._copies.device, settings.max_tokens)
        else:
            self._shares = FetchedShares(settings.fetched_share, settings.fetched_share)
        fetcher.shares = self._shares
        return FetchedExperts(fetcher, self._resident)

    def _short(self, tokens: int) -> ExpertPlaces:
        """Where the experts are for a step of so many tokens that does not stream."""
        if self._fetched is None or self._shares.of(tokens) == 0:
            return self._resident
        return self._fetched

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        return self._pool.bytes

    @property
    def handoff(self) -> Handoff | None:
        """To the CPU's experts; None: all are on the GPU."""
        return self._handoff

    @property
    def statistics(self) -> ExpertStatistics:
        """What has happened so far."""
        placement, streaming = self._placement, self._streaming
        return ExpertStatistics(
            experts=sum(layer.experts for layer in self._layers),
            on_gpu=sum(self._pool.slots),
            hit_rate=placement.hit_rate if placement else None,
            moves=placement.moves if placement else 0,
            streamed_steps=streaming.steps if streaming else 0,
            streamed_bytes=streaming.bytes if streaming else 0,
            fetched_shares=self._shares,
        )

    @property
    def takes_turns(self) -> bool:
        """Whether parts of a step may take turns (`parts`)."""
        return self._handoff is not None and not self._defers

    def parts(self, rows: Sequence[int]) -> list[StepExperts]:
        """The experts for each part, two at most, of a captured step that decodes. While the CPU works for one, the
        stream goes on with the other: so it has no time to fetch anything ahead."""
        assert self._handoff is not None
        self._handoff.begin()
        return [
            StepExperts(self._layers, self._short(tokens), self._handoff, slot=slot) for slot, tokens in enumerate(rows)
        ]

    def step(self, tokens: int, scored: int, *, decodes: bool, captured: bool) -> StepExperts:
        """The experts for a step of so many tokens. `scored`: tokens that reach the last layer's experts; `decodes`:
        each is the only one of its row, and scored; `captured`: the step has to be like all others of its size."""
        if self._handoff is not None:
            self._handoff.begin()
        where = short = self._short(tokens)
        defers = decodes and self._defers
        if self._streaming is not None and self._streaming.takes(tokens) and not captured and not defers:
            where = self._streaming.begin(self._resident, tokens, scored)
        predicts = decodes and self._predicts and where is short
        return StepExperts(self._layers, where, self._handoff, defers=defers, predicts=predicts)

    @torch.inference_mode()
    def after_step(self) -> None:
        """See GpuDecoder.after_step."""
        if self._handoff is not None:
            self._handoff.check()
        if self._streaming is not None:
            self._streaming.after_step()
        if self._placement is not None:
            self._placement.after_step()

    def close(self) -> None:
        """Stop the service thread of the CPU's experts, unpin their memory."""
        if self._handoff is not None:
            self._handoff.close()
        self._copies.close()
