"""Builds the input tensors of a step on the host: token ids, positions, cache slots and page tables.

Mostly plain Python, because a decode step has only a few numbers for each row, and one numpy call costs as much as
several rows. Knows nothing of scheduling or of devices.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ktqueue.engine.prompt_logprobs import PromptRows
from ktqueue.engine.sequence import NO_SLOT, Sequence
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one step; all tensors are on the CPU.

    input_ids, position_ids: [1, tokens] int64; positions have the `rotary_offset` of their sequence. scored: [scored]
    int64, rising indices of the tokens whose logits are needed: the last token of each row that has no known tokens
    left, drafts, and tokens of prompts whose log probabilities are wanted. `next_rows`: rows of the logits that belong
    to last tokens and drafts; None: all. `prompts`: the other rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    scored: torch.Tensor
    step: StepContext
    next_rows: list[int] | None = None
    prompts: tuple[PromptRows, ...] = ()

    @property
    def decodes(self) -> bool:
        """Whether each row computes one token and needs its logits."""
        return self.step.context_lengths.shape[0] == self.input_ids.shape[1] == self.scored.shape[0]


class Numbers:
    """Numbers that come one by one or many at once."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.int64]] = []
        self._single: list[int] = []

    def append(self, number: int) -> None:
        """Add one."""
        self._single.append(number)

    def extend(self, numbers: npt.ArrayLike) -> None:
        """Add many. An array is neither copied nor taken apart until `array`."""
        self._arrays += [np.array(self._single, dtype=np.int64), np.asarray(numbers, dtype=np.int64)]
        self._single = []

    def array(self) -> npt.NDArray[np.int64]:
        """All of them: [numbers], an array of its own."""
        rest = np.array(self._single, dtype=np.int64)
        return np.concatenate([*self._arrays, rest]) if self._arrays else rest


class BatchBuilder:
    """Builds batches whose keys and values are written to `kv`.

    drafts_apart: whether each draft is a row of its own, on the pages of its sequence. Its keys are written before any
    row attends, so it sees those before it. A step of such rows is a decode step, which may be captured. With states it
    reads the one that the row before writes, so drafts must be apart.
    """

    def __init__(self, kv: KVCache, *, drafts_apart: bool = False) -> None:
        self._kv = kv
        self._drafts_apart = drafts_apart

    def build(self, rows: Mapping[Sequence, int], drafts: Mapping[Sequence, Many[int]] | None = None) -> Batch:
        """Build the batch that computes the next `rows[sequence]` tokens of each sequence, the last of them `drafts`.

        If a token is not known yet, as in a prepared step, `write_token_ids` adds it later.
        """
        page_size = self._kv.layout.page_size
        apart = drafts if drafts and self._drafts_apart else {}
        height = len(rows) + sum(map(len, apart.values()))
        table = np.zeros((height, max(sequence.page_count for sequence in rows)), dtype=np.int32)
        input_ids, positions, slots = Numbers(), Numbers(), Numbers()
        starts: list[int] = [0]
        contexts: list[int] = []
        scored: list[int] = []
        next_rows: list[int] = []
        prompts: list[PromptRows] = []
        sources: list[int] = []
        targets: list[int] = []
        has_states = self._kv.slots > 0
        for sequence, count in rows.items():
            first, pages = sequence.num_computed_tokens, sequence.page_count
            context = first + count
            if count == 1 and context >= sequence.length and sequence.samples:  # most rows: it decodes
                table[len(contexts), :pages] = sequence.pages[:pages]
                next_rows.append(len(scored))
                scored.append(starts[-1])
                input_ids.append(sequence.tokens.item(first))  # Python's numbers make arrays faster than numpy's do
                positions.append(first + sequence.rotary_offset)
                slots.append(sequence.pages.item(first // page_size) * page_size + first % page_size)
                starts.append(starts[-1] + 1)
                contexts.append(context)
                if has_states:
                    sources.append(_source(sequence))
                    targets.append(sequence.next_state)
                continue
            more_rows = len(apart.get(sequence, ()))
            first_row = len(contexts)
            table[first_row : first_row + 1 + more_rows, :pages] = sequence.pages[:pages]
            row = table[first_row]
            drafted = drafts.get(sequence, ()) if drafts else ()
            computed = np.arange(first, context)
            input_ids.extend(sequence.tokens[first : context - len(drafted)])
            if drafted:
                input_ids.extend(drafted)
            positions.extend(computed + sequence.rotary_offset)
            slots.extend(row[computed // page_size] * page_size + computed % page_size)
            if positions_of_prompt := sequence.scored_positions(count):
                start = starts[-1] - first
                prompts.append(
                    PromptRows(
                        sequence, positions_of_prompt, range(len(scored), len(scored) + len(positions_of_prompt))
                    )
                )
                scored += [start + position for position in positions_of_prompt]
            end = starts[-1] + count
            for later in range(more_rows, -1, -1):
                starts.append(end - later)
                contexts.append(context - later)
            if has_states:
                sources.append(_source(sequence))
                targets += [sequence.next_state, *sequence.draft_states]
                sources += targets[len(sources) - 1 : -1] if more_rows else []
            if context >= sequence.length and sequence.samples:
                for place in range(end - len(drafted) - 1, end):
                    next_rows.append(len(scored))
                    scored.append(place)
        return Batch(
            input_ids=torch.from_numpy(input_ids.array()[None]),
            position_ids=torch.from_numpy(positions.array()[None]),
            scored=torch.from_numpy(np.array(scored, dtype=np.int64)),
            step=StepContext(
                query_starts=torch.from_numpy(np.array(starts, dtype=np.int32)),
                context_lengths=torch.from_numpy(np.array(contexts, dtype=np.int32)),
                page_table=torch.from_numpy(table),
                slot_mapping=torch.from_numpy(slots.array()),
                kv=self._kv,
                state_sources=_slots(sources),
                state_targets=_slots(targets),
            ),
            next_rows=next_rows if prompts else None,
            prompts=tuple(prompts),
        )

    @staticmethod
    def write_token_ids(batch: Batch, rows: Mapping[Sequence, int]) -> None:
        """Write the next token of each row into `batch`, which was built for these rows with one token each."""
        batch.input_ids.numpy()[0] = [sequence.tokens.item(sequence.num_computed_tokens) for sequence in rows]


def _source(sequence: Sequence) -> int:
    """Return the slot of the sequence's state. Without one it starts from zeros, and any slot will do."""
    return sequence.next_state if sequence.state == NO_SLOT else sequence.state


def _slots(numbers: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.int32))
