"""GraphRunner: a model on a device. Decode steps replay a captured function on fixed tensors; all others run eagerly.

A captured step has a fixed number of rows, its bucket. Rows that pad a batch to its bucket compute token 0 at position
0 of the scratch page, which nobody owns; `live_tokens` tells the model how many rows are real. The planner of the
attention is told of each step on the host, before the step is launched.
"""

from collections.abc import Callable

import numpy as np
import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.capture import Capturer
from ktqueue.engine.runner import Model
from ktqueue.engine.staging import FixedStaging, Staging
from ktqueue.operators.gpu.attention import AttentionPlanner
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext

Progress = Callable[[int, int, str], None]
"""progress(done, total, what)"""

_FIRST_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_BUCKET_STEP = 64  # beyond them


def buckets_up_to(rows: int) -> list[int]:
    """Row counts that decode steps are padded to, rising; the last is `rows`."""
    below = [*_FIRST_BUCKETS, *range(_FIRST_BUCKETS[-1] + _BUCKET_STEP, rows, _BUCKET_STEP)]
    return [one for one in below if one < rows] + [rows]


class GraphRunner:
    """Runner (see there) of a model on `device`, whose steps attend as `planner` says.

    `buckets`: row counts to capture, the largest first; none: every step runs eagerly. `kv` has a scratch page where
    there are buckets. `max_pages`: of a row. `progress` is called after each capture.
    """

    def __init__(
        self,
        model: Model,
        vocab: int,
        kv: KVCache,
        planner: AttentionPlanner,
        capturer: Capturer,
        *,
        device: str,
        buckets: list[int],
        max_pages: int,
        progress: Progress | None = None,
    ) -> None:
        self._model = model
        self._vocab = vocab
        self._planner = planner
        self._device = torch.device(device)
        self._staging = Staging(device)
        self._prepared: Batch | None = None
        self._graphs: list[_Bucket] = []  # rising
        self.replayed = 0  # steps
        before = capturer.used() if buckets else 0
        with torch.inference_mode():
            for done, rows in enumerate(sorted(buckets, reverse=True), start=1):
                self._graphs.insert(0, _Bucket(rows, max_pages, kv, planner, self._forward, capturer, device))
                if progress is not None:
                    progress(done, len(buckets), "decode graphs")
        self.graph_bytes = max(0, capturer.used() - before) if buckets else 0  # something else may have been freed
        """Device memory that the captured steps hold."""

    def execute(self, batch: Batch) -> torch.Tensor:
        """As Runner says."""
        with torch.inference_mode():
            prepared, self._prepared = self._prepared, None
            bucket = self._bucket(batch)
            if bucket is None:
                return self._eager(batch)
            if prepared is not batch:
                bucket.prepare(batch)
            self.replayed += 1
            return bucket.run(batch)

    def prepare(self, batch: Batch) -> bool:
        """As Runner says. Eager steps are not prepared."""
        with torch.inference_mode():
            bucket = self._bucket(batch)
            if bucket is None:
                return False
            bucket.prepare(batch)
            self._prepared = batch
            return True

    def wait(self) -> None:
        """As Runner says."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _bucket(self, batch: Batch) -> "_Bucket | None":
        """The one that `batch` is replayed with; None: it runs eagerly."""
        rows = batch.scored.shape[0]
        return next((one for one in self._graphs if one.rows >= rows), None) if batch.decodes else None

    def _eager(self, batch: Batch) -> torch.Tensor:
        host = batch.step
        tensors = [batch.input_ids, batch.position_ids, batch.scored, host.query_starts, host.context_lengths]
        tensors += [host.page_table, host.slot_mapping]
        staged = self._staging.put([one.numpy() for one in tensors])
        input_ids, position_ids, scored, starts, contexts, table, slots = staged
        step = StepContext(starts, contexts, table, slots, host.kv, attention=self._planner.plan(host))
        return self._forward(input_ids, position_ids, scored, step)

    def _forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, scored: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=scored, step=step
        ).logits
        return logits[0, :, : self._vocab].float()


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepContext], torch.Tensor]


class _Bucket:
    """A decode step of `rows` rows: its fixed tensors, its attention, its replay."""

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
        self._fill(None)
        host, on_device, input_ids = self._staging.host, self._staging.device, self._tokens.device["input_ids"]
        self._host = StepContext(host["starts"], host["contexts"], host["pages"], host["slots"], kv)
        self._attention = planner.decode_plan(rows, max_pages)
        self._attention.update(self._host)
        self._staging.send()
        step = StepContext(
            on_device["starts"],
            on_device["contexts"],
            on_device["pages"],
            on_device["slots"],
            kv,
            attention=self._attention,
            live_tokens=on_device["live"],
        )
        self._replay = capturer.capture(
            lambda: forward(input_ids, on_device["position_ids"], on_device["scored"], step)
        )

    def prepare(self, batch: Batch) -> None:
        """Send all of the batch but its token ids, behind what the device was given."""
        self._staging.open()
        self._fill(batch)
        self._attention.update(self._host)
        self._staging.send()

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of the real rows of a batch that was prepared."""
        live = batch.scored.shape[0]
        ids = self._tokens.open()["input_ids"]
        ids[0, :live] = batch.input_ids[0].numpy()
        ids[0, live:] = 0
        self._tokens.send()
        return self._replay()[:live]

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
