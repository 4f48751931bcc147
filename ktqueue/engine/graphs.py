"""GraphRunner: a model on a device. Decode steps replay a captured function on fixed tensors; all others run eagerly.

A captured step has a fixed number of rows, its bucket (bucket.py). The planner of the attention is told of each step on
the host, before the step is launched.
"""

import logging
from collections.abc import Callable

import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.bucket import Bucket
from ktqueue.engine.capture import Capturer
from ktqueue.engine.overlap import Overlap, keys_to_overlap
from ktqueue.engine.runner import Model
from ktqueue.engine.staging import Staging
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""progress(done, total, what)"""

_FIRST_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_BUCKET_STEP = 64  # beyond them


def buckets_up_to(rows: int) -> list[int]:
    """Row counts that decode steps are padded to, rising; the last is `rows`."""
    below = [*_FIRST_BUCKETS, *range(_FIRST_BUCKETS[-1] + _BUCKET_STEP, rows, _BUCKET_STEP)]
    return [one for one in below if one < rows] + [rows]


def steps_to_capture(rows: int, *, overlap: Overlap) -> int:
    """How many captured steps a runner has at most that decodes up to `rows` rows, halves included."""
    buckets = buckets_up_to(rows)
    return len(buckets) + (0 if overlap == "off" else sum(one > 1 for one in buckets))


class GraphRunner:
    """Runner (see there) of a model on `device`, whose steps attend as `planner` says.

    `buckets`: row counts to capture, the largest first; none: every step runs eagerly. `kv` has a scratch page where
    there are buckets. `max_pages`: of a row. `overlap`: whether decode steps are cut into halves that take turns, which
    the model must know how to do. `progress` is called after each capture.
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
        overlap: Overlap = "off",
        progress: Progress | None = None,
    ) -> None:
        self._model = model
        self._vocab = vocab
        self._planner = planner
        self._device = torch.device(device)
        self._staging = Staging(device)
        self._prepared: Batch | None = None
        self._graphs: list[Bucket] = []  # rising
        self.replayed = 0  # steps
        self.overlapped = 0  # of these
        before = capturer.used() if buckets else 0
        with torch.inference_mode():
            for done, rows in enumerate(sorted(buckets, reverse=True), start=1):
                self._graphs.insert(0, Bucket(rows, max_pages, kv, planner, self._forward, capturer, device))
                if progress is not None:
                    progress(done, len(buckets), "decode graphs")
            if overlap != "off":
                self._overlap(overlap, kv)
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
            self.overlapped += bucket.overlaps
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

    def _overlap(self, overlap: Overlap, kv: KVCache) -> None:
        """Cut buckets into halves: all that can be, or those for which it pays. With more rows halves have more experts
        in common, which each of them reads, so the first for which it does not is the last to be tried."""
        for bucket in self._graphs:
            if bucket.rows == 1:
                continue
            try:
                bucket.cut()
            except torch.OutOfMemoryError as error:
                if overlap == "on":
                    raise
                logger.warning("decode steps of %d rows and more run whole: %s", bucket.rows, error)
                break
            bucket.overlapped_keys = 0 if overlap == "on" else keys_to_overlap(bucket, kv, self._vocab, self.wait)
            if bucket.overlapped_keys is None:
                bucket.join()
                break

    def _bucket(self, batch: Batch) -> Bucket | None:
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
