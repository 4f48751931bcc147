"""Bucket: a decode step of a fixed number of rows, captured on tensors that never move.

Rows that pad a batch to its bucket compute token 0 at position 0 of the scratch page, which nobody owns; `live_tokens`
tells the model how many rows are real.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.gpu.graph_capture import Capturer, Function
from ktqueue.engine.gpu.staging import FixedStaging
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepContext], torch.Tensor]
"""(input_ids, position_ids, scored, step) -> logits, all on the device."""


class Bucket:
    """Decode steps of `rows` rows: their fixed tensors, their attention, their replay."""

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
        self._kv = kv
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
                "live": ((1,), np.int32),
                "pages": ((rows, max_pages), np.int32),
            },
            device,
        )
        arrays = self._staging.open()
        arrays["scored"][:] = np.arange(rows)
        arrays["starts"][:] = np.arange(rows + 1)
        self._widest = 0
        self._host_step = self._step(self._staging.host)
        self._plan = planner.decode_plan(rows, max_pages)
        self._replay = self._capture(forward, capturer)

    def prepare(self, batch: Batch) -> None:
        """Send all of the batch but its token ids, behind what the device was given."""
        self._staging.open()
        self._fill(batch)
        self._plan.update(self._host_step)
        self._staging.send()

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of the real rows of a batch that was prepared."""
        live = batch.scored.shape[0]
        ids = self._tokens.open()["input_ids"]
        ids[0, :live] = batch.input_ids[0].numpy()
        ids[0, live:] = 0
        self._tokens.send()
        return self._replay()[:live]

    def _capture(self, forward: Forward, capturer: Capturer) -> Function:
        """Capture the step with padding alone."""
        self._staging.open()
        self._fill(None)
        self._staging.send()
        device = self._staging.device
        step = replace(self._step(device), attention=self._plan, live_tokens=device["live"])
        input_ids, position_ids, scored = self._tokens.device["input_ids"], device["position_ids"], device["scored"]
        self._plan.update(self._host_step)
        return capturer.capture(lambda: forward(input_ids, position_ids, scored, step))

    def _step(self, tensors: Mapping[str, torch.Tensor]) -> StepContext:
        """The step that reads these tensors, without its attention."""
        return StepContext(tensors["starts"], tensors["contexts"], tensors["pages"], tensors["slots"], self._kv)

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
        arrays["live"][0] = live
