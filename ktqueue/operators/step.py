"""StepContext: everything that an operator may read in one step. It is passed as the keyword `step`."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy.typing as npt
import torch

from ktqueue.operators.kv_cache import KVCache

_Array = npt.NDArray[Any]
Result = TypeVar("Result")


class ScoreOptions(NamedTuple):
    """How the attention of a layer makes weights of scores.

    scaling: factor of the scores. sliding_window: keys that a token sees at most, including itself; 0: no limit. chunk:
    a token at position p sees keys from p // chunk * chunk on (Llama 4); 0: from 0 on. sinks: [heads]
    float32, a further score in the softmax of each head that has no value (gpt-oss); None: there is none. cap: a score
    x becomes cap * tanh(x / cap) (Gemma 2); 0: it does not.
    """

    scaling: float
    sliding_window: int = 0
    sinks: torch.Tensor | None = None
    cap: float = 0.0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What a decoder computes in a step. logits: [1, scored, vocabulary] float32."""

    logits: torch.Tensor


class AttentionPlan(Protocol):
    """How the tokens of one step attend on a GPU. Made once per step and used by every layer."""

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """query [tokens, heads, head_dim] -> [tokens, heads, value_dim]. The step's keys and values are already in the
        cache.

        Raises ValueError for an option that the plan does not compute.
        """


def _no_slots() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int32)


def result_of(parts: Generator[None, None, Result]) -> Result:
    """Run all parts of a step, and return what they compute."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: Result = end.value
            return result


@dataclass(frozen=True, slots=True)
class StepContext:
    """One packed batch: `tokens` tokens of `rows` rows, row after row, in any mix of prefill chunks and decode.

    query_starts: [rows + 1] int32, offsets of each row's tokens in the packed batch.
    context_lengths: [rows] int32, keys that the row's last token sees, including those of this step.
    page_table: [rows, max_pages] int32, the row's pages in order; unused entries are 0.
    slot_mapping: [tokens] int64, page * page_size + offset at which each token's key and value are stored.
    kv: the paged cache.
    attention: how the step attends on a GPU; None: use the arrays above.
    state_sources, state_targets: [rows] int32, the slots from which the row's state is read, and to which it is
    written; empty without linear attention. A row whose first token is in this step starts from zeros. If all rows have
    one token, a row may read what the row before it writes: it continues that row.
    live_tokens: [1] int32, number of real tokens, which come first; the others pad a captured graph. None: all tokens.
    """

    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    page_table: torch.Tensor
    slot_mapping: torch.Tensor
    kv: KVCache
    attention: AttentionPlan | None = None
    live_tokens: torch.Tensor | None = None
    state_sources: torch.Tensor = field(default_factory=_no_slots)
    state_targets: torch.Tensor = field(default_factory=_no_slots)

    def arrays(self) -> tuple[_Array, _Array, _Array, _Array, _Array, _Array]:
        """The arrays of the step, on the host, in the order in which the compiled decoder takes them."""
        return (
            self.query_starts.numpy(),
            self.context_lengths.numpy(),
            self.page_table.contiguous().numpy(),
            self.slot_mapping.numpy(),
            self.state_sources.numpy(),
            self.state_targets.numpy(),
        )

    def next_slots(self) -> torch.Tensor:
        """[rows] int64, where the token after each row's last one is stored. Its page must be in the table.

        A row that pads a captured graph has only its first page.
        """
        size = self.kv.layout.page_size
        places = self.context_lengths.long()
        pages = self.page_table.gather(1, (places // size)[:, None])[:, 0]
        slots: torch.Tensor = pages * size + places % size
        if size > 1 or self.live_tokens is None:
            return slots
        is_live = torch.arange(len(slots), device=slots.device) < self.live_tokens
        return torch.where(is_live, slots, self.slot_mapping)  # of one token a row


class StepInputs(NamedTuple):
    """What a decoder computes a step of. input_ids, position_ids: [1, tokens] int64; logits_to_keep: [scored] int64,
    the tokens that are scored, rising. All are on the decoder's device."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_to_keep: torch.Tensor
    step: StepContext
