"""From logits to the next token of each sequence: edits, greedy or drawn, with log probabilities where wanted.

Knows nothing of pages or of what becomes of the token.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from ktqueue.core.events import PositionLogprobs
from ktqueue.engine.logit_edits import edit, flat_edits
from ktqueue.engine.logprobs import logprobs
from ktqueue.engine.sampler import GREEDY_BELOW, Sampler, SamplingRows, greedy
from ktqueue.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome for each row, in order. Where `finite` is False the token id means nothing.

    `waited`: seconds in which the host had nothing to do for this step, since the device was at it.
    """

    token_ids: list[int]
    finite: list[bool]
    logprobs: dict[int, PositionLogprobs]
    waited: float = field(default=0.0, compare=False)

    def joined(self, other: "Selection") -> "Selection":
        """This one's rows, then the other's."""
        behind = len(self.token_ids)
        return Selection(
            self.token_ids + other.token_ids,
            self.finite + other.finite,
            self.logprobs | {behind + row: told for row, told in other.logprobs.items()},
            self.waited + other.waited,
        )


Meanwhile = Callable[[], None]
"""What the host may do while a device is at work: launches there what comes behind, and waits for nothing of it."""


def nothing() -> None:
    """A Meanwhile."""


class Selector(Protocol):
    """Chooses tokens, on whatever device the logits are."""

    def select(
        self, logits: torch.Tensor, rows: Many[int], sequences: Many[Sequence], meanwhile: Meanwhile = nothing
    ) -> Selection:
        """A token for each of `sequences` from row `rows[i]` of `logits` [scored, vocab] float32, which may be written
        to. Several sequences may share a row. Returns when the tokens are on the host; `meanwhile` is called before the
        wait for them, or not at all where there is none."""


class HostSelector:
    """Selector for logits on the CPU. `token_bytes` names the tokens of log probabilities."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._sampler = Sampler()

    def select(
        self, logits: torch.Tensor, rows: Many[int], sequences: Many[Sequence], meanwhile: Meanwhile = nothing
    ) -> Selection:
        """As Selector says; there is no wait."""
        array = logits.numpy()
        if len(rows) > len(array):
            array = array[list(rows)]  # choices that share their prompt's last logits
        samplings = [one.request.sampling for one in sequences]
        told = [row for row, sampling in enumerate(samplings) if sampling.logprobs is not None]
        raw = array[told] if told else array
        chosen, finite = greedy(array)
        edited = [row for row, one in enumerate(sequences) if one.edits is not None and finite[row]]
        if edited:
            edit(array, flat_edits(edited, [edits for row in edited if (edits := sequences[row].edits) is not None]))
            chosen[edited], finite[edited] = greedy(array[edited])
        drawn = [row for row, one in enumerate(samplings) if one.temperature >= GREEDY_BELOW and finite[row]]
        if drawn:
            part = array if len(drawn) == len(sequences) else array[drawn]
            chosen[drawn] = self._sampler.sample(part, sampling_rows([sequences[row] for row in drawn]))
        tokens = chosen.tolist()
        return Selection(
            token_ids=tokens,
            finite=finite.tolist(),
            logprobs={
                row: logprobs(raw[place], tokens[row], samplings[row].logprobs or 0, self._token_bytes)
                for place, row in enumerate(told)
                if finite[row]
            },
        )


def sampling_rows(sequences: Many[Sequence]) -> SamplingRows:
    """The parameters with which the next token of each sequence is drawn."""
    numbers = np.array(
        [(s.temperature, s.top_k, s.top_p, s.min_p) for s in (one.request.sampling for one in sequences)]
    )
    return SamplingRows(
        temperature=numbers[:, 0],
        top_k=numbers[:, 1].astype(np.int64),
        top_p=numbers[:, 2],
        min_p=numbers[:, 3],
        stream=np.array([one.stream for one in sequences], dtype=np.uint64),
        position=np.array([one.generated for one in sequences], dtype=np.int64),
    )
