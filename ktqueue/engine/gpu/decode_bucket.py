"""A decode step with a fixed number of rows, captured on tensors that never move.

A smaller batch is padded to the bucket. Padding rows compute any token at position 0 of the scratch page, which no
sequence uses, and the scratch slot of states. `live_tokens` tells the model how many rows are real.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Never

import numpy as np
import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.gpu.graph_capture import Function
from ktqueue.engine.runner import DeviceTokens
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.gpu.device import launches_dependents
from ktqueue.operators.gpu.kernels.operation import dependent_launches
from ktqueue.operators.gpu.kernels.take_rows import take_rows
from ktqueue.operators.gpu.staging import FixedStaging
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepContext], torch.Tensor]
"""(input_ids, position_ids, scored, step) -> logits [scored, vocab], all on the device."""


def not_captured() -> Never:
    """In place of a step that is not captured yet."""
    raise RuntimeError("the step is not captured")


class DecodeBucket:
    """A captured decode step of `rows` rows: its fixed tensors, its attention plan, its replay."""

    def __init__(self, rows: int, max_pages: int, kv: KVCache, planner: AttentionPlanner, device: str) -> None:
        if kv.scratch_page is None:
            raise ValueError("a captured step needs a cache with a scratch page")
        self.rows = rows
        self._kv = kv
        self._has_states = kv.slots > 0
        self._scratch_page = kv.scratch_page
        page_size = kv.layout.page_size
        self._scratch_slots = kv.scratch_page * page_size + np.arange(rows) % page_size
        # Token ids are known last, so they have a copy of their own. A copy is queued behind the step before, which
        # reads the same tensors, and is done before the next step starts. So the host seldom waits to write again.
        self._tokens = FixedStaging({"input_ids": ((1, rows), np.int64)}, device)
        self._places = FixedStaging({"places": ((rows,), np.int64)}, device)  # of token ids that are on the device
        self._sent_places: list[int] = []
        self._staging = FixedStaging(
            {
                "position_ids": ((1, rows), np.int64),
                "scored": ((rows,), np.int64),
                "slots": ((rows,), np.int64),
                "starts": ((rows + 1,), np.int32),
                "contexts": ((rows,), np.int32),
                "live": ((1,), np.int32),
                "sources": ((rows if self._has_states else 0,), np.int32),
                "targets": ((rows if self._has_states else 0,), np.int32),
                "pages": ((max_pages, rows), np.int32),  # by columns, of which few are used and sent
            },
            device,
        )
        arrays = self._staging.open()
        arrays["scored"][:] = np.arange(rows)
        arrays["starts"][:] = np.arange(rows + 1)
        self._widest = self._sent_pages = 0  # pages of the longest row, and of that of the step before, too
        self._host_step = self._step(self._staging.host)
        self._plan = planner.decode_plan(rows, max_pages)
        self.replay: Function = not_captured  # set it to the captured `padding_step` before the first run

    def padding_step(self, forward: Forward) -> Function:
        """The step with padding rows only, prepared, on the fixed tensors."""
        self._staging.open()
        self._fill(None)
        self._staging.send()
        device = self._staging.device
        step = replace(self._step(device), attention=self._plan, live_tokens=device["live"])
        input_ids, position_ids, scored = self._tokens.device["input_ids"], device["position_ids"], device["scored"]
        self._plan.update(self._host_step)
        return lambda: forward(input_ids, position_ids, scored, step)

    def prepare(self, batch: Batch) -> None:
        """Copy everything but the token ids to the device, behind the work that is queued there."""
        self._staging.open()
        self._fill(batch)
        self._plan.update(self._host_step)
        self._staging.send(self._sent_pages * self.rows)

    def run(self, batch: Batch, tokens: DeviceTokens | None = None) -> torch.Tensor:
        """Run a prepared batch. Returns the logits of its real rows, [rows, vocab]. `tokens`: see Runner.execute."""
        live = batch.scored.shape[0]
        if tokens is None:
            ids = self._tokens.open()["input_ids"]
            ids[0, :live] = batch.input_ids[0].numpy()
            ids[0, live:] = 0
            self._tokens.send()
        else:
            wanted = tokens.places + [0] * (self.rows - live)  # padding rows compute any token
            if wanted != self._sent_places:  # rows seldom change their places
                self._places.open()["places"][:] = wanted
                self._places.send()
                self._sent_places = wanted
            target = self._tokens.device["input_ids"]
            with dependent_launches(launches_dependents(target.device)):
                take_rows(tokens.ids[:, None], self._places.device["places"], target.T)
        return self.replay()[:live]

    def _step(self, tensors: Mapping[str, torch.Tensor]) -> StepContext:
        """A step that reads these tensors, without its attention plan."""
        return StepContext(
            tensors["starts"],
            tensors["contexts"],
            tensors["pages"].T,
            tensors["slots"],
            self._kv,
            state_sources=tensors["sources"],
            state_targets=tensors["targets"],
        )

    def _fill(self, batch: Batch | None) -> None:
        """Write the batch without its token ids, and the padding rows. None: padding rows only."""
        arrays = self._staging.arrays
        live = 0
        width = 1
        if batch is not None:
            live = batch.scored.shape[0]
            table = batch.step.page_table.numpy()
            width = table.shape[1]
        positions, slots, contexts = (arrays[key] for key in ("position_ids", "slots", "contexts"))
        pages = arrays["pages"].T
        self._sent_pages, self._widest = max(width, self._widest), width
        pages[:, : self._sent_pages] = 0
        if batch is not None:
            positions[0, :live] = batch.position_ids[0].numpy()
            slots[:live] = batch.step.slot_mapping.numpy()
            contexts[:live] = batch.step.context_lengths.numpy()
            pages[:live, :width] = table
            if self._has_states:
                arrays["sources"][:live] = batch.step.state_sources.numpy()
                arrays["targets"][:live] = batch.step.state_targets.numpy()
        positions[0, live:] = 0
        slots[live:] = self._scratch_slots[live:]
        contexts[live:] = 1
        pages[live:, 0] = self._scratch_page
        arrays["live"][0] = live
        for name in ("sources", "targets"):
            arrays[name][live:] = self._kv.scratch_slot
