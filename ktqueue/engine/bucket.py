"""Bucket: a decode step of a fixed number of rows, captured on tensors that never move.

Rows that pad a batch to its bucket compute token 0 at position 0 of the scratch page, which nobody owns; `live_tokens`
tells the model how many rows are real.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.capture import Capturer, Function
from ktqueue.engine.staging import FixedStaging
from ktqueue.operators.gpu.attention.base import AttentionPlanner, DecodePlan
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepContext], torch.Tensor]
"""(input_ids, position_ids, scored, step) -> logits, all on the device."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured step, and what of it is planned on the host before it is replayed."""

    plans: Sequence[tuple[DecodePlan, StepContext]]
    replay: Function

    def plan(self) -> None:
        """For what the host's arrays say."""
        for plan, host in self.plans:
            plan.update(host)


class Bucket:
    """Decode steps of `rows` rows: their fixed tensors, their attention, their replay.

    Once it is `cut` it has two ways to run them: all rows at once, or in halves that take turns. overlapped_keys: from
    so many keys on, which all rows of a step see together, it runs in halves; None: never.
    """

    def __init__(
        self,
        rows: int,
        max_pages: int,
        kv: KVCache,
        planner: AttentionPlanner,
        forward: Forward,
        capturer: Capturer,
        device: str,
    ) -> None:
        if kv.scratch_page is None:
            raise ValueError("a captured step needs a cache with a scratch page")
        self.rows = rows
        self.max_pages = max_pages
        self.overlapped_keys: int | None = None
        self._half = -(-rows // 2)  # rows of the first
        self._kv = kv
        self._planner = planner
        self._forward = forward
        self._capturer = capturer
        self._scratch_page = kv.scratch_page
        page_size = kv.layout.page_size
        self._scratch_slots = kv.scratch_page * page_size + np.arange(rows) % page_size
        # Token ids are the last to be known, so they go alone. Copies come behind the step before, which reads the same
        # tensors; each is done before that step's successor begins, so that the host seldom waits to write again.
        self._tokens = FixedStaging({"input_ids": ((1, rows), np.int64)}, device)
        self._staging = FixedStaging(
            {
                "position_ids": ((1, rows), np.int64),
                "scored": ((rows,), np.int64),
                "slots": ((rows,), np.int64),
                "starts": ((rows + 1,), np.int32),
                "contexts": ((rows,), np.int32),
                "live": ((3,), np.int32),  # of all rows, of the first half, of the second
                "pages": ((rows, max_pages), np.int32),
            },
            device,
        )
        arrays = self._staging.open()
        arrays["scored"][:] = np.arange(rows)
        arrays["starts"][:] = np.arange(rows + 1)
        self._widest = 0
        self._whole = self._capture([0, rows])
        self._halves: _Captured | None = None
        self._next = self._whole

    def cut(self) -> None:
        """Capture the halves of two rows or more."""
        self._halves = self._capture([0, self._half, self.rows])

    def join(self) -> None:
        """Give the halves up."""
        self.overlapped_keys, self._halves, self._next = None, None, self._whole

    @property
    def overlaps(self) -> bool:
        """Whether the batch that was prepared last runs in halves."""
        return self._next is self._halves

    def prepare(self, batch: Batch) -> None:
        """Send all of the batch but its token ids, behind what the device was given."""
        self._staging.open()
        self._fill(batch)
        self._next = self._whole
        if self._halves is not None and self.overlapped_keys is not None:
            keys = int(batch.step.context_lengths.sum())
            self._next = self._halves if keys >= self.overlapped_keys else self._whole
        self._next.plan()
        self._staging.send()

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of the real rows of a batch that was prepared."""
        live = batch.scored.shape[0]
        ids = self._tokens.open()["input_ids"]
        ids[0, :live] = batch.input_ids[0].numpy()
        ids[0, live:] = 0
        self._tokens.send()
        return self._next.replay()[:live]

    def _capture(self, bounds: Sequence[int]) -> _Captured:
        """A step whose parts lie between `bounds`; one part: all rows at once. It is captured with padding alone."""
        self._staging.open()
        self._fill(None)
        self._staging.send()
        host, device = self._staging.host, self._staging.device
        first_live = len(bounds) - 2
        plans: list[tuple[DecodePlan, StepContext]] = []
        parts: list[StepContext] = []
        for number, (first, last) in enumerate(itertools.pairwise(bounds), start=first_live):
            plan = self._planner.decode_plan(last - first, self.max_pages)
            plans.append((plan, self._rows(host, first, last)))
            live = device["live"][number : number + 1]
            parts.append(replace(self._rows(device, first, last), attention=plan, live_tokens=live))
        step = parts[0]
        if len(parts) > 1:
            live = device["live"][:1]
            step = replace(self._rows(device, 0, self.rows), live_tokens=live, parts=tuple(parts))
        input_ids, position_ids, scored = self._tokens.device["input_ids"], device["position_ids"], device["scored"]
        for attention, rows in plans:
            attention.update(rows)
        return _Captured(plans, self._capturer.capture(lambda: self._forward(input_ids, position_ids, scored, step)))

    def _rows(self, tensors: Mapping[str, torch.Tensor], first: int, last: int) -> StepContext:
        """The rows from `first` to before `last`, as a step of their own."""
        rows, starts = slice(first, last), tensors["starts"][: last - first + 1]
        return StepContext(starts, tensors["contexts"][rows], tensors["pages"][rows], tensors["slots"][rows], self._kv)

    def _fill(self, batch: Batch | None) -> None:
        """Write the batch without its token ids, and the padding; None: padding alone."""
        arrays = self._staging.arrays
        live = 0
        width = 1
        if batch is not None:
            live = batch.scored.shape[0]
            table = batch.step.page_table.numpy()
            width = table.shape[1]
        positions, slots, contexts = (arrays[key] for key in ("position_ids", "slots", "contexts"))
        pages = arrays["pages"]
        pages[:, : max(width, self._widest)] = 0
        self._widest = width
        if batch is not None:
            positions[0, :live] = batch.position_ids[0].numpy()
            slots[:live] = batch.step.slot_mapping.numpy()
            contexts[:live] = batch.step.context_lengths.numpy()
            pages[:live, :width] = table
        positions[0, live:] = 0
        slots[live:] = self._scratch_slots[live:]
        contexts[live:] = 1
        pages[live:, 0] = self._scratch_page
        arrays["live"][:] = live, min(live, self._half), max(0, live - self._half)
