"""From logits to the next token of each sequence: edits, greedy or drawn, with log probabilities where wanted.

Knows nothing of pages or of what becomes of the token.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktqueue.core.events import PositionLogprobs
from ktqueue.engine.logits import edit
from ktqueue.engine.logprobs import logprobs
from ktqueue.engine.sampler import GREEDY_BELOW, Sampler, SamplingRows, greedy
from ktqueue.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome for each row, in order. Where `finite` is False the token id means nothing."""

    token_ids: list[int]
    finite: list[bool]
    logprobs: dict[int, PositionLogprobs]


class Selector:
    """`token_bytes` names the tokens of log probabilities."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._sampler = Sampler()

    def select(self, logits: NDArray[np.float32], sequences: Many[Sequence]) -> Selection:
        """Choose a token for each sequence from its row of `logits` [rows, vocab], which may be written to."""
        samplings = [one.request.sampling for one in sequences]
        told = [row for row, sampling in enumerate(samplings) if sampling.logprobs is not None]
        raw = logits[told] if told else logits
        chosen, finite = greedy(logits)
        edited = [row for row, one in enumerate(sequences) if one.edits is not None and finite[row]]
        if edited:
            edit(logits, edited, [edits for row in edited if (edits := sequences[row].edits) is not None])
            chosen[edited], finite[edited] = greedy(logits[edited])
        drawn = [row for row, one in enumerate(samplings) if one.temperature >= GREEDY_BELOW and finite[row]]
        if drawn:
            part = logits if len(drawn) == len(sequences) else logits[drawn]
            chosen[drawn] = self._sampler.sample(part, _rows([sequences[row] for row in drawn]))
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


def _rows(sequences: Many[Sequence]) -> SamplingRows:
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
