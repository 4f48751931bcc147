"""Chooses tokens on the device that has the logits. One copy brings the tokens to the host.

The parameters (edits, noise, limits) go to the device in one copy of a few kilobytes while the model still computes.
A greedy batch needs none. Whole rows of logits never leave the device.
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
from ktqueue.engine.gpu.device_sampler import CANDIDATES, DrawnRows, draw_from_all, draw_from_few, weigh
from ktqueue.engine.logit_edits import flat_edits
from ktqueue.engine.logits import Logits
from ktqueue.engine.logprobs import log_probabilities, position_logprobs
from ktqueue.engine.noise import uniform
from ktqueue.engine.sampler import GREEDY_BELOW, Uniform
from ktqueue.engine.sequence import Sequence
from ktqueue.engine.token_masks import MaskedRows
from ktqueue.engine.token_selector import Meanwhile, TokenSelection, are_some, do_nothing, sampling_rows
from ktqueue.operators.gpu.kernels.greedy import greedy
from ktqueue.operators.gpu.staging import ResultFetcher, Staging

_WORD = 32  # bits


@dataclass(slots=True)
class _StepArrays:
    """The rows of each kind in one step, and the arrays for the device by name."""

    with_logprobs: list[int] = field(default_factory=list)
    alternatives: int = 0
    drawn_from_all: list[int] = field(default_factory=list)
    drawn_from_few: list[int] = field(default_factory=list)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


class DeviceSelector:
    """Selector for logits on `device`. `token_bytes` gives the bytes of a token for log probabilities.

    Filtered rows look at `candidates` tokens, and at all tokens only if these are too few.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        device: str,
        *,
        candidates: int = CANDIDATES,
        noise: Uniform = uniform,
    ) -> None:
        self._token_bytes = token_bytes
        self._candidates = candidates
        self._uniform = noise
        self._staging = Staging(device)
        self._fetcher = ResultFetcher(device)

    @torch.inference_mode()
    def select(
        self,
        scored: Logits,
        rows: Many[int],
        sequences: Many[Sequence],
        meanwhile: Meanwhile = do_nothing,
        masked: MaskedRows | None = None,
        ahead: Many[int] = (),
    ) -> TokenSelection:
        """See Selector."""
        work = _collect(rows, sequences, ahead, scored.shape, self._uniform)
        arrays = work.arrays
        if masked is not None:
            assert masked.late is None, "a device checks no greedy tokens"
            arrays["masks"] = masked.masks
            if len(masked.rows) < len(sequences):
                arrays["grammar_rows"] = np.array(masked.rows, dtype=np.int64)
        on_device: dict[str, torch.Tensor] = {}
        if arrays:
            on_device = dict(zip(arrays, self._staging.put(list(arrays.values())), strict=True))
        logits = scored[on_device["rows"] if "rows" in on_device else slice(None)]
        best = greedy(logits)
        if masked is not None:
            logits = _apply_masks(logits, on_device["masks"], on_device.get("grammar_rows"))
            best = _still_finite(greedy(logits), best)
        unedited = logits[on_device["with_logprobs"]] if work.with_logprobs else logits
        if "masked_ids" in on_device:
            logits = logits.clone()  # so that the call can be repeated if memory runs out below
            _edit(logits, on_device)
            best = _still_finite(greedy(logits), best)
        chosen, finite = best
        drawn = _DrawnTokens(best)
        if work.drawn_from_all:
            parameters = _drawn_rows(on_device, "all")
            found = draw_from_all(weigh(_select_rows(logits, on_device, "all_rows"), parameters), parameters)
            chosen.index_copy_(0, on_device["all_rows"], found)
        if work.drawn_from_few:
            parameters = _drawn_rows(on_device, "few")
            weights = weigh(_select_rows(logits, on_device, "few_rows"), parameters)
            found, enough = draw_from_few(weights, parameters, self._candidates)
            chosen.index_copy_(0, on_device["few_rows"], found)
            drawn.enough = enough | (finite[on_device["few_rows"]] == 0)
        if work.with_logprobs:
            drawn.described = on_device["with_logprobs"]
            drawn.logprobs = log_probabilities(unedited)
            if work.alternatives:
                drawn.alternatives = unedited.topk(work.alternatives, dim=1).indices
        # From here on, `meanwhile` may have launched the step that overwrites the logits.
        began = time.perf_counter()
        answer = self._fetch(drawn, lambda: meanwhile(chosen, not work.drawn_from_few))
        waited = time.perf_counter() - began
        lacking = np.flatnonzero(answer.enough == 0).tolist()
        for place in lacking:  # one by one, which takes little memory
            found, _ = draw_from_few(weights[place : place + 1], parameters.row(place), weights.shape[1])
            chosen[work.drawn_from_few[place]] = found[0]
        if lacking:
            answer = self._fetch(drawn, lambda: None)
        return TokenSelection(
            token_ids=answer.tokens,
            finite=answer.finite,
            logprobs=self._logprobs(answer, work, sequences),
            redrawn=bool(lacking),
            waited=waited,
        )

    def _fetch(self, drawn: "_DrawnTokens", meanwhile: Callable[[], None]) -> "_FetchedTokens":
        """Bring the tokens and what describes them to the host."""
        parts = [*drawn.tokens]
        if drawn.enough is not None:
            parts.append(drawn.enough.long())
        if drawn.logprobs is not None:
            chosen = drawn.tokens[0][drawn.described][:, None]
            parts.append(drawn.logprobs.gather(1, chosen)[:, 0].view(torch.int64))
            if drawn.alternatives is not None:
                values = drawn.logprobs.gather(1, drawn.alternatives)
                parts += [drawn.alternatives.flatten(), values.flatten().view(torch.int64)]
        ends = list(itertools.accumulate(part.shape[0] for part in parts))
        all_parts = torch.cat(parts) if len(parts) > len(drawn.tokens) else drawn.tokens.flatten()
        fetched = self._fetcher.fetch(all_parts, meanwhile)
        tokens, fine, *others = (fetched[start:end] for start, end in itertools.pairwise([0, *ends]))
        enough = others.pop(0) if drawn.enough is not None else fine[:0]
        return _FetchedTokens(tokens.tolist(), fine.astype(bool).tolist(), enough.copy(), others)

    def _logprobs(
        self, answer: "_FetchedTokens", work: _StepArrays, sequences: Many[Sequence]
    ) -> dict[int, PositionLogprobs]:
        if not work.with_logprobs:
            return {}
        chosen = answer.logprobs[0].view(np.float64)
        shape = len(work.with_logprobs), work.alternatives
        ids = answer.logprobs[1].reshape(shape) if work.alternatives else np.empty(shape, dtype=np.int64)
        values = answer.logprobs[2].view(np.float64).reshape(shape) if work.alternatives else np.empty(shape)
        return {
            row: position_logprobs(
                answer.tokens[row],
                float(chosen[place]),
                ids[place],
                values[place],
                sequences[row].request.sampling.logprobs or 0,
                self._token_bytes,
            )
            for place, row in enumerate(work.with_logprobs)
            if answer.finite[row]
        }


@dataclass(slots=True)
class _DrawnTokens:
    """The tokens of a step on the device, and what is still needed once the logits are overwritten.

    tokens: [2, rows] int64, see `greedy`; enough: [filtered rows] bool, whether the candidates sufficed.
    Of rows with log probabilities, described: [described] int64, their numbers; logprobs: [described, vocab] float64;
    alternatives: [described, alternatives] int64.
    """

    tokens: torch.Tensor
    enough: torch.Tensor | None = None
    described: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    alternatives: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _FetchedTokens:
    """What was fetched to the host. `enough`: 0 where the candidates did not suffice. `logprobs`: packed arrays."""

    tokens: list[int]
    finite: list[bool]
    enough: NDArray[np.int64]
    logprobs: list[NDArray[np.int64]]


def _collect(
    rows: Many[int], sequences: Many[Sequence], ahead: Many[int], shape: torch.Size, noise: Uniform
) -> _StepArrays:
    """Sort the rows by kind and collect the arrays that the device needs. `shape`: of the logits, [scored, vocab]."""
    scored, vocab = shape
    work = _StepArrays()
    arrays = work.arrays
    samplings = [sequence.request.sampling for sequence in sequences]
    if are_some(rows, scored):
        arrays["rows"] = np.array(rows, dtype=np.int64)
    work.with_logprobs = [row for row, params in enumerate(samplings) if params.logprobs is not None]
    if work.with_logprobs:
        work.alternatives = min(vocab, max(samplings[row].logprobs or 0 for row in work.with_logprobs))
        arrays["with_logprobs"] = np.array(work.with_logprobs, dtype=np.int64)
    edited = [row for row, sequence in enumerate(sequences) if sequence.edits is not None]
    if edited:
        flat = flat_edits(edited, [edits for row in edited if (edits := sequences[row].edits) is not None])
        arrays |= {name: getattr(flat, name) for name in flat.__slots__}
    for row, params in enumerate(samplings):
        if params.temperature >= GREEDY_BELOW:
            filtered = 0 < params.top_k < vocab or params.top_p < 1.0
            (work.drawn_from_few if filtered else work.drawn_from_all).append(row)
    for kind, drawn in (("all", work.drawn_from_all), ("few", work.drawn_from_few)):
        if drawn:
            numbers = sampling_rows(sequences, ahead, drawn)
            arrays[f"{kind}_rows"] = np.array(drawn, dtype=np.int64)
            arrays[f"{kind}_inverse"] = (1.0 / numbers.temperature).astype(np.float32)
            arrays[f"{kind}_top_k"] = numbers.top_k
            arrays[f"{kind}_top_p"] = numbers.top_p
            arrays[f"{kind}_min_p"] = numbers.min_p.astype(np.float32)
            arrays[f"{kind}_noise"] = noise(numbers.stream, numbers.position)
    return work


def _drawn_rows(on_device: dict[str, torch.Tensor], kind: str) -> DrawnRows:
    return DrawnRows(
        inverse_temperature=on_device[f"{kind}_inverse"],
        top_k=on_device[f"{kind}_top_k"],
        top_p=on_device[f"{kind}_top_p"],
        min_p=on_device[f"{kind}_min_p"],
        noise=on_device[f"{kind}_noise"],
    )


def _select_rows(logits: torch.Tensor, on_device: dict[str, torch.Tensor], rows: str) -> torch.Tensor:
    """The rows of `logits` that `on_device[rows]` names, without a copy if these are all."""
    return logits if len(on_device[rows]) == len(logits) else logits[on_device[rows]]


def _still_finite(best: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`best` of edited logits, where rows stay what they were if they were not finite `before`: see `greedy`."""
    best[1] &= before[1]
    return best


def _apply_masks(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """A copy of `logits` [rows, vocab] with -inf for tokens that are not allowed.

    `masks`: [masked, words] int32, a bit for each token. `rows`: [masked] int64, the rows that have them; None: all.
    """
    vocab = logits.shape[1]
    bits = torch.arange(_WORD, dtype=torch.int32, device=masks.device)
    forbidden = ((masks[:, :, None] >> bits) & 1 == 0).flatten(1)[:, :vocab]
    if rows is None:
        return logits.masked_fill(forbidden, -torch.inf)
    return logits.index_copy(0, rows, logits[rows].masked_fill_(forbidden, -torch.inf))


def _edit(logits: torch.Tensor, edits: dict[str, torch.Tensor]) -> None:
    """Apply a FlatEdits whose arrays are on the device, as `logit_edits.edit` does. Empty parts launch nothing."""
    if len(edits["limited_rows"]):
        entries = edits["allowed_rows"], edits["allowed_ids"]
        allowed = logits[entries]
        logits.index_fill_(0, edits["limited_rows"], -torch.inf)
        logits[entries] = allowed
    if len(edits["bias"]):
        entries = edits["bias_rows"], edits["bias_ids"]
        logits[entries] = logits[entries] + edits["bias"]
    if len(edits["masked_ids"]):
        entries = edits["masked_rows"], edits["masked_ids"]
        logits[entries] = torch.full_like(edits["masked_ids"], -torch.inf, dtype=torch.float32)
    if len(edits["counts"]):
        entries = edits["counted_rows"], edits["counted_ids"]
        values, repetition, counts = logits[entries], edits["repetition"], edits["counts"]
        values = torch.where(values > 0.0, values / repetition, values * repetition)
        values -= edits["frequency"] * counts
        logits[entries] = values - edits["presence"] * (counts > 0.0)
