"""Decode steps of a decoder that are captured once and replayed."""

from typing import Any

import torch
from decoder_families import Cache

from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.step import DecoderOutput, StepContext

ROWS = 3


class Captured:
    """Decode steps of up to `rows` sequences that are replayed. They have one row more, which is padding, or none."""

    def __init__(self, decoder: GpuDecoder, cache: Cache, *, rows: int = ROWS, padding: int = 1) -> None:
        self._cache = cache
        live = torch.tensor([rows], dtype=torch.int32, device="cuda")
        rows += padding
        self._pages = 24
        ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        self._ids, self._positions, self._slots = (
            torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(3)
        )
        self._table = torch.zeros(rows, self._pages, **ints)
        self._contexts = torch.ones(rows, **ints)
        starts = torch.arange(rows + 1, **ints)
        self._plan = cache.planner.decode_plan(rows, self._pages)
        self._host(self._empty())
        step = StepContext(starts, self._contexts, self._table, self._slots, cache.kv, self._plan, live)
        scored = torch.arange(rows, device="cuda")
        self._read = step, scored  # by every replay, so they must live

        def forward() -> torch.Tensor:
            output: DecoderOutput = decoder(
                input_ids=self._ids[None], position_ids=self._positions[None], logits_to_keep=scored, step=step
            )
            return output.logits

        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            forward()
            forward()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = forward()

    def _empty(self) -> dict[str, list[Any]]:
        scratch = self._cache.kv.pages - 1
        slot = scratch * self._cache.kv.layout.page_size
        return {"ids": [0], "positions": [0], "slots": [slot], "contexts": [1], "pages": [[scratch]]}

    def _host(self, rows: dict[str, list[Any]]) -> None:
        """Give these rows and padding to the fixed tensors and to the plan."""
        padding = self._empty()
        count = len(self._ids)
        full = {key: (values + count * padding[key])[:count] for key, values in rows.items()}
        table = torch.zeros(count, self._pages, dtype=torch.int32)
        for row, pages in enumerate(full["pages"]):
            table[row, : len(pages)] = torch.tensor(pages)
        contexts = torch.tensor(full["contexts"], dtype=torch.int32)
        starts = torch.arange(count + 1, dtype=torch.int32)
        self._plan.update(StepContext(starts, contexts, table, torch.tensor(full["slots"]), self._cache.kv))
        for target, values in ((self._ids, "ids"), (self._positions, "positions"), (self._slots, "slots")):
            target.copy_(torch.tensor(full[values]))
        self._table.copy_(table)
        self._contexts.copy_(contexts)

    def step(self, tokens: dict[str, int]) -> torch.Tensor:
        """Feed each sequence one token: logits [rows, vocab]."""
        cache, size = self._cache, self._cache.kv.layout.page_size
        rows: dict[str, list[Any]] = {"ids": [], "positions": [], "slots": [], "contexts": [], "pages": []}
        for name, token in tokens.items():
            position, pages = cache.fed[name], cache.pages[name]
            if position // size == len(pages):
                pages.append(cache._free.pop())
            cache.fed[name] = position + 1
            rows["ids"].append(token)
            rows["positions"].append(position)
            rows["slots"].append(pages[position // size] * size + position % size)
            rows["contexts"].append(position + 1)
            rows["pages"].append(list(pages))
        self._host(rows)
        self._graph.replay()
        torch.cuda.synchronize()
        return self._logits[0, : len(tokens)].float().cpu()
