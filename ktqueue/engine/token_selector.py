"""Chooses the next token of each sequence from the logits: edits, greedy or random choice, log probabilities.

Knows nothing of pages, nor of text.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from ktqueue.core.events import PositionLogprobs
from ktqueue.engine.logit_edits import edit, flat_edits
from ktqueue.engine.logits import Logits
from ktqueue.engine.logprobs import logprobs
from ktqueue.engine.noise import uniform
from ktqueue.engine.sampler import GREEDY_BELOW, Sampler, SamplingRows, Uniform, greedy
from ktqueue.engine.sequence import Sequence
from ktqueue.engine.token_masks import MaskedRows
from ktqueue.operators.token_masks import mask_logits


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """The chosen tokens by row. Where `finite` is False, the token id has no meaning.

    `logprobs` has entries for the rows that asked for them. `redrawn`: whether some tokens are not those that
    `Meanwhile` was called with. `waited`: seconds that the host waited for the device.
    """

    token_ids: list[int]
    finite: list[bool]
    logprobs: dict[int, PositionLogprobs]
    redrawn: bool = False
    waited: float = field(default=0.0, compare=False)

    def joined(self, other: "TokenSelection") -> "TokenSelection":
        """These rows, followed by the other's rows."""
        offset = len(self.token_ids)
        return TokenSelection(
            self.token_ids + other.token_ids,
            self.finite + other.finite,
            self.logprobs | {offset + row: logprobs for row, logprobs in other.logprobs.items()},
            self.redrawn or other.redrawn,
            self.waited + other.waited,
        )


Meanwhile = Callable[[torch.Tensor, bool], None]
"""meanwhile(tokens, are_final): work for the host while the device computes.

It may queue work on the device, but not wait for it, and may overwrite the logits. tokens: [sequences] int64 on the
device, the chosen token ids. are_final: False if some of them may be drawn again.
"""


def do_nothing(tokens: torch.Tensor, are_final: bool) -> None:
    """A Meanwhile without work."""


class Selector(Protocol):
    """Chooses tokens on the device that has the logits."""

    def select(
        self,
        logits: Logits,
        rows: Many[int],
        sequences: Many[Sequence],
        meanwhile: Meanwhile = do_nothing,
        masked: MaskedRows | None = None,
        ahead: Many[int] = (),
    ) -> TokenSelection:
        """Choose a token for `sequences[i]` from row `rows[i]` of `logits` [scored, vocab] float32.

        It is the token after the next `ahead[i]` tokens of the sequence, which are drafts; without `ahead` the next.

        `masked` says which tokens the grammars allow; log probabilities are those of the allowed tokens. The logits may
        be overwritten. Several sequences may share a row. Returns when the tokens are on the host. If
        the host has to wait for the device, `meanwhile` is called before.
        """


class HostSelector:
    """Selector for logits on the CPU. `token_bytes` gives the bytes of a token for log probabilities.

    Sampling uses up to `threads` threads.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, noise: Uniform = uniform, threads: int = 1) -> None:
        self._token_bytes = token_bytes
        self._sampler = Sampler(noise, threads)

    def select(
        self,
        logits: Logits,
        rows: Many[int],
        sequences: Many[Sequence],
        meanwhile: Meanwhile = do_nothing,
        masked: MaskedRows | None = None,
        ahead: Many[int] = (),
    ) -> TokenSelection:
        """See Selector. The CPU never waits, so `meanwhile` is not called."""
        array = logits[:].numpy()
        if are_some(rows, len(array)):
            array = array[list(rows)]
        samplings = [sequence.request.sampling for sequence in sequences]
        with_logprobs = [row for row, sampling in enumerate(samplings) if sampling.logprobs is not None]
        chosen, finite = greedy(array)
        if masked is not None:
            masked = masked.completed(chosen)
        if masked is not None and masked.rows:
            mask_logits(array, masked.masks, masked.rows)
            chosen[masked.rows], allowed = greedy(array if len(masked.rows) == len(array) else array[masked.rows])
            finite[masked.rows] &= allowed
        unedited = array[with_logprobs] if with_logprobs else array
        edited = [row for row, sequence in enumerate(sequences) if sequence.edits is not None and finite[row]]
        if edited:
            edit(array, flat_edits(edited, [edits for row in edited if (edits := sequences[row].edits) is not None]))
            chosen[edited], finite[edited] = greedy(array[edited])
        drawn = [row for row, params in enumerate(samplings) if params.temperature >= GREEDY_BELOW and finite[row]]
        if drawn:
            part = array if len(drawn) == len(sequences) else array[drawn]
            chosen[drawn] = self._sampler.sample(part, sampling_rows(sequences, ahead, drawn))
        tokens = chosen.tolist()
        return TokenSelection(
            token_ids=tokens,
            finite=finite.tolist(),
            logprobs={
                row: logprobs(unedited[place], tokens[row], samplings[row].logprobs or 0, self._token_bytes)
                for place, row in enumerate(with_logprobs)
                if finite[row]
            },
        )


def are_some(rows: Many[int], scored: int) -> bool:
    """Whether `rows` are not all `scored` rows in order. Choices of a request share the last row of their prompt."""
    return len(rows) != scored or any(row != place for place, row in enumerate(rows))


def sampling_rows(sequences: Many[Sequence], ahead: Many[int], drawn: Many[int]) -> SamplingRows:
    """The sampling parameters of the rows `drawn`: see Selector.select."""
    position = [sequences[row].generated + (ahead[row] if ahead else 0) for row in drawn]
    sequences = [sequences[row] for row in drawn]
    numbers = np.array(
        [(s.temperature, s.top_k, s.top_p, s.min_p) for s in (sequence.request.sampling for sequence in sequences)]
    )
    return SamplingRows(
        temperature=numbers[:, 0],
        top_k=numbers[:, 1].astype(np.int64),
        top_p=numbers[:, 2],
        min_p=numbers[:, 3],
        stream=np.array([sequence.noise_stream for sequence in sequences], dtype=np.uint64),
        position=np.array(position, dtype=np.int64),
    )
