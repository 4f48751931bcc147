"""A step that reads short prompts, captured on tensors that never move.

It takes any mix of chunks and decode rows up to a number of tokens. A smaller step is padded. Padding tokens compute
any token, belong to no row, and their keys go to the scratch page. Padding rows have no tokens and no keys. Padding
scored places repeat the last one, so they need no further experts. `live_tokens` says how many tokens are real.
"""

from dataclasses import replace

import numpy as np
import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.gpu.decode_bucket import Forward, not_captured
from ktqueue.engine.gpu.graph_capture import Function
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.gpu.staging import FixedStaging
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext

ROWS = 16
"""Most rows, and most scored tokens, of a captured step with prompts."""
MOST_KEYS = 16384
"""Most keys of a row. A row that decodes reads all its keys in turn, where an eager plan splits them. With more keys
this takes as long as the launches that are saved: see docs/adr/0077."""
_SIZES = (32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def prompt_buckets_up_to(tokens: int) -> list[int]:
    """The token counts that steps with prompts are padded to, in rising order; none is above `tokens`. None if that is
    at most ROWS: with all tokens scored, a step would not say which."""
    last = min(tokens, _SIZES[-1])
    return [count for count in _SIZES if count < last] + [last] if last > ROWS else []


class PromptBucket:
    """A captured step of up to `tokens` tokens: its fixed tensors, its attention plan, its replay."""

    def __init__(self, tokens: int, max_pages: int, kv: KVCache, planner: AttentionPlanner, device: str) -> None:
        if kv.scratch_page is None or kv.slots:
            raise ValueError("a captured step with prompts needs a cache with a scratch page and without states")
        if tokens <= ROWS:
            raise ValueError(f"a captured step with prompts has more than {ROWS} tokens, not {tokens}")
        self.tokens = tokens
        page_size = kv.layout.page_size
        self._max_pages = min(max_pages, -(-MOST_KEYS // page_size))
        self._scratch_slots = kv.scratch_page * page_size + np.arange(tokens) % page_size
        rows = ROWS + 1  # the last is always padding
        self._staging = FixedStaging(
            {
                "input_ids": ((1, tokens), np.int64),
                "position_ids": ((1, tokens), np.int64),
                "scored": ((ROWS,), np.int64),
                "slots": ((tokens,), np.int64),
                "starts": ((rows + 1,), np.int32),
                "contexts": ((rows,), np.int32),
                "live": ((1,), np.int32),
                "pages": ((rows, self._max_pages), np.int32),
            },
            device,
        )
        self._kv = kv
        self._plan = planner.prompt_plan(ROWS, tokens, self._max_pages)
        self.replay: Function = not_captured  # set it to the captured `padding_step` before the first run

    def padding_step(self, forward: Forward) -> Function:
        """The step with padding only, prepared, on the fixed tensors."""
        self._staging.open()
        self._fill(None)
        self._staging.send()
        at = self._staging.device
        step = StepContext(at["starts"], at["contexts"], at["pages"], at["slots"], self._kv)
        step = replace(step, attention=self._plan, live_tokens=at["live"])
        return lambda: forward(at["input_ids"], at["position_ids"], at["scored"], step)

    def holds(self, batch: Batch) -> bool:
        """Whether the bucket can compute this step."""
        return len(batch.scored) <= ROWS and self._plan.holds(batch.step)

    def run(self, batch: Batch) -> torch.Tensor:
        """Run a batch that the bucket holds. Returns the logits of its scored tokens, [scored, vocab]."""
        self._staging.open()
        self._fill(batch)
        self._plan.update(batch.step)
        self._staging.send()
        return self.replay()[: len(batch.scored)]

    def _fill(self, batch: Batch | None) -> None:
        """Write the batch and what pads it. None: padding only."""
        arrays = self._staging.arrays
        live = rows = scored = 0
        arrays["pages"][:] = 0
        if batch is not None:
            step = batch.step
            live, rows, scored = batch.input_ids.shape[1], len(step.context_lengths), len(batch.scored)
            arrays["input_ids"][0, :live] = batch.input_ids[0].numpy()
            arrays["position_ids"][0, :live] = batch.position_ids[0].numpy()
            arrays["slots"][:live] = step.slot_mapping.numpy()
            arrays["scored"][:scored] = batch.scored.numpy()
            arrays["starts"][: rows + 1] = step.query_starts.numpy()
            arrays["contexts"][:rows] = step.context_lengths.numpy()
            table = step.page_table.numpy()[:, : self._max_pages]  # further pages are for tokens that come later
            arrays["pages"][:rows, : table.shape[1]] = table
        for name in ("input_ids", "position_ids"):
            arrays[name][0, live:] = 0
        arrays["slots"][live:] = self._scratch_slots[live:]
        arrays["scored"][scored:] = arrays["scored"][scored - 1] if scored else 0
        arrays["starts"][rows:] = live
        arrays["contexts"][rows:] = 0
        arrays["live"][0] = live
