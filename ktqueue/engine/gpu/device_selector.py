"""DeviceSelector: tokens are chosen where the logits are, and one copy brings them to the host.

The host's part of the parameters (edits, noise, limits) goes to the device in one copy of a few kilobytes, made while
the model still computes; a greedy batch needs none. Whole rows of logits never leave the device.
"""

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktqueue.core.events import PositionLogprobs
from ktqueue.engine.gpu.device_sampler import (
    CANDIDATES,
    DrawnRows,
    draw_from_all,
    draw_from_few,
    greedy,
    log_probabilities,
    weigh,
)
from ktqueue.engine.gpu.staging import Fetcher, Staging
from ktqueue.engine.logit_edits import flat_edits
from ktqueue.engine.logprobs import told_logprobs
from ktqueue.engine.noise import uniform
from ktqueue.engine.sampler import GREEDY_BELOW
from ktqueue.engine.sequence import Sequence
from ktqueue.engine.token_selector import Meanwhile, Selection, nothing, sampling_rows


@dataclass(slots=True)
class _Work:
    """What there is to do for one step: the rows of each kind, and the arrays for the device by name."""

    told: list[int] = field(default_factory=list)
    alternatives: int = 0
    drawn_from_all: list[int] = field(default_factory=list)
    drawn_from_few: list[int] = field(default_factory=list)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


class DeviceSelector:
    """Selector (see there) for logits on `device`. `token_bytes` names the tokens of log probabilities."""

    def __init__(self, token_bytes: Callable[[int], bytes], device: str) -> None:
        self._token_bytes = token_bytes
        self._staging = Staging(device)
        self._fetcher = Fetcher(device)

    def select(
        self, logits: torch.Tensor, rows: Many[int], sequences: Many[Sequence], meanwhile: Meanwhile = nothing
    ) -> Selection:
        """As Selector says."""
        with torch.inference_mode():
            return self._select(logits, rows, sequences, meanwhile)

    def _select(
        self, logits: torch.Tensor, rows: Many[int], sequences: Many[Sequence], meanwhile: Meanwhile
    ) -> Selection:
        work = _work(rows, sequences, logits.shape)
        arrays = work.arrays
        on_device: dict[str, torch.Tensor] = {}
        if arrays:
            on_device = dict(zip(arrays, self._staging.put(list(arrays.values())), strict=True))
        if "rows" in on_device:
            logits = logits[on_device["rows"]]
        raw = logits[on_device["told"]] if work.told else logits
        chosen, finite = greedy(logits)
        if "masked_ids" in on_device:
            logits = logits.clone()  # so that the same call may be made again, should memory run out below
            _edit(logits, on_device)
            chosen, still = greedy(logits)
            finite &= still
        answer = self._draw(logits, raw, chosen, finite, on_device, work, CANDIDATES, meanwhile)
        waited = answer.waited
        if not answer.enough:
            answer = self._draw(logits, raw, chosen, finite, on_device, work, logits.shape[1], nothing)
        return Selection(
            token_ids=answer.tokens,
            finite=answer.finite,
            logprobs=self._logprobs(answer, work, sequences),
            waited=waited,
        )

    def _draw(
        self,
        logits: torch.Tensor,
        raw: torch.Tensor,
        chosen: torch.Tensor,
        finite: torch.Tensor,
        on_device: dict[str, torch.Tensor],
        work: _Work,
        candidates: int,
        meanwhile: Meanwhile,
    ) -> "_Answer":
        """Draw where there is something to draw, and fetch everything. `candidates`: looked at in filtered rows."""
        chosen = chosen.clone()
        parts = [chosen, finite.long()]
        if work.drawn_from_all:
            rows = _drawn_rows(on_device, "all")
            drawn = draw_from_all(weigh(_some(logits, on_device, "all_rows"), rows), rows)
            chosen.index_copy_(0, on_device["all_rows"], drawn)
        if work.drawn_from_few:
            rows = _drawn_rows(on_device, "few")
            drawn, enough = draw_from_few(weigh(_some(logits, on_device, "few_rows"), rows), rows, candidates)
            chosen.index_copy_(0, on_device["few_rows"], drawn)
            parts.append((enough | ~finite[on_device["few_rows"]]).long())
        if work.told:
            wide = log_probabilities(raw)
            parts.append(wide.gather(1, chosen[on_device["told"]][:, None])[:, 0].view(torch.int64))
            if work.alternatives:
                ids = raw.topk(work.alternatives, dim=1).indices
                parts += [ids.flatten(), wide.gather(1, ids).flatten().view(torch.int64)]
        packed = torch.cat(parts)
        ends = list(itertools.accumulate(part.shape[0] for part in parts))
        began = time.perf_counter()
        fetched = self._fetcher.fetch(packed, meanwhile)
        waited = time.perf_counter() - began
        tokens, fine, *others = (fetched[start:end] for start, end in itertools.pairwise([0, *ends]))
        enough_rows = others.pop(0) if work.drawn_from_few else fine[:0]
        return _Answer(tokens.tolist(), fine.astype(bool).tolist(), bool(enough_rows.all()), others, waited)

    def _logprobs(self, answer: "_Answer", work: _Work, sequences: Many[Sequence]) -> dict[int, PositionLogprobs]:
        if not work.told:
            return {}
        own = answer.told[0].view(np.float64)
        shape = len(work.told), work.alternatives
        ids = answer.told[1].reshape(shape) if work.alternatives else np.empty(shape, dtype=np.int64)
        values = answer.told[2].view(np.float64).reshape(shape) if work.alternatives else np.empty(shape)
        return {
            row: told_logprobs(
                answer.tokens[row],
                float(own[place]),
                ids[place],
                values[place],
                sequences[row].request.sampling.logprobs or 0,
                self._token_bytes,
            )
            for place, row in enumerate(work.told)
            if answer.finite[row]
        }


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came to the host. `enough`: the candidates sufficed in all finite rows. `told`: the log probabilities."""

    tokens: list[int]
    finite: list[bool]
    enough: bool
    told: list[NDArray[np.int64]]
    waited: float  # seconds


def _work(rows: Many[int], sequences: Many[Sequence], shape: torch.Size) -> _Work:
    """Sort the rows by kind and collect the arrays that the device needs. `shape` is that of the logits."""
    scored, vocab = shape
    work = _Work()
    arrays = work.arrays
    samplings = [one.request.sampling for one in sequences]
    if len(rows) != scored:
        arrays["rows"] = np.array(rows, dtype=np.int64)
    work.told = [row for row, one in enumerate(samplings) if one.logprobs is not None]
    if work.told:
        work.alternatives = min(vocab, max(samplings[row].logprobs or 0 for row in work.told))
        arrays["told"] = np.array(work.told, dtype=np.int64)
    edited = [row for row, one in enumerate(sequences) if one.edits is not None]
    if edited:
        flat = flat_edits(edited, [edits for row in edited if (edits := sequences[row].edits) is not None])
        arrays |= {name: getattr(flat, name) for name in flat.__slots__}
    for row, one in enumerate(samplings):
        if one.temperature >= GREEDY_BELOW:
            filtered = 0 < one.top_k < vocab or one.top_p < 1.0
            (work.drawn_from_few if filtered else work.drawn_from_all).append(row)
    for kind, drawn in (("all", work.drawn_from_all), ("few", work.drawn_from_few)):
        if drawn:
            numbers = sampling_rows([sequences[row] for row in drawn])
            arrays[f"{kind}_rows"] = np.array(drawn, dtype=np.int64)
            arrays[f"{kind}_inverse"] = (1.0 / numbers.temperature).astype(np.float32)
            arrays[f"{kind}_top_k"] = numbers.top_k
            arrays[f"{kind}_top_p"] = numbers.top_p
            arrays[f"{kind}_min_p"] = numbers.min_p.astype(np.float32)
            arrays[f"{kind}_noise"] = uniform(numbers.stream, numbers.position)
    return work


def _drawn_rows(on_device: dict[str, torch.Tensor], kind: str) -> DrawnRows:
    return DrawnRows(
        inverse_temperature=on_device[f"{kind}_inverse"],
        top_k=on_device[f"{kind}_top_k"],
        top_p=on_device[f"{kind}_top_p"],
        min_p=on_device[f"{kind}_min_p"],
        noise=on_device[f"{kind}_noise"],
    )


def _some(logits: torch.Tensor, on_device: dict[str, torch.Tensor], rows: str) -> torch.Tensor:
    """The rows of that name; all of them if there are as many."""
    return logits if len(on_device[rows]) == len(logits) else logits[on_device[rows]]


def _edit(logits: torch.Tensor, edits: dict[str, torch.Tensor]) -> None:
    """What logits.edit does, with the arrays of a FlatEdits on the device; without entries nothing is launched."""
    if len(edits["bias"]):
        at = edits["bias_rows"], edits["bias_ids"]
        logits[at] = logits[at] + edits["bias"]
    if len(edits["masked_ids"]):
        at = edits["masked_rows"], edits["masked_ids"]
        logits[at] = torch.full_like(edits["masked_ids"], -torch.inf, dtype=torch.float32)
    if len(edits["counts"]):
        at = edits["counted_rows"], edits["counted_ids"]
        values, repetition, counts = logits[at], edits["repetition"], edits["counts"]
        values = torch.where(values > 0.0, values / repetition, values * repetition)
        values -= edits["frequency"] * counts
        logits[at] = values - edits["presence"] * (counts > 0.0)
