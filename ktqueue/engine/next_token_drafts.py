"""NextTokenDrafts: drafts of the layer behind a model's own that predicts the token after the next. See docs/adr/0064.

The model keeps the input of its head for each token, in the pages of the cache. The layer reads it there, beside the
token that follows, and has a cache of its own with the same pages. For further drafts its output takes the place of
what the model would have computed. Once drafts are verified, the layer computes their positions again.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import torch

from ktqueue.engine.draft_model import DraftModel
from ktqueue.engine.sequence import Sequence
from ktqueue.engine.token_selector import Selector
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext


class NextTokenModel(Protocol):
    """Such a layer. `hidden_size`: columns of what it reads."""

    hidden_size: int

    def keep_hidden(self, hidden: torch.Tensor) -> None:
        """Let the model write the input of its head to [pages, page_size, hidden_size] float32."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden: torch.Tensor,
        scored: torch.Tensor,
        step: StepContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [scored, vocabulary] and outputs [scored, hidden] of input_ids, position_ids [1, tokens] and hidden
        [tokens, hidden]."""


@dataclass(frozen=True, slots=True)
class NextTokenSource:
    """What NextTokenDrafts is made of: the layer, the layout of its cache, and the tokens that it can see."""

    layer: NextTokenModel
    layout: KVLayout
    longest: int

    def make(self, vocab: int, pages: int, selector: Selector, most_tokens: int) -> "NextTokenDrafts":
        """See DraftSource.make. The model keeps the input of its head from now on."""
        kept = torch.zeros(pages, self.layout.page_size, self.layer.hidden_size)
        self.layer.keep_hidden(kept)
        kv = KVCache(self.layout, pages)
        return NextTokenDrafts(self.layer, vocab, kept, kv, selector, self.longest, most_tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.layout.page_bytes + 4 * self.layout.page_size * self.layer.hidden_size


class NextTokenDrafts(DraftModel):
    """A DraftModel whose position p has the token at p + 1. kept: [pages, page_size, hidden] float32, written by the
    model. Token ids are below `vocab`."""

    unread = 2

    def __init__(
        self,
        layer: NextTokenModel,
        vocab: int,
        kept: torch.Tensor,
        kv: KVCache,
        selector: Selector,
        longest: int,
        most_tokens: int,
    ) -> None:
        super().__init__(None, kv, selector, longest, most_tokens)
        self._layer = layer
        self._vocab = vocab
        self._kept_rows = kept
        self._outputs: dict[Sequence, torch.Tensor] = {}  # of the last pass, [hidden] each

    def copy_page(self, source: int, target: int) -> None:
        """See DraftModel."""
        super().copy_page(source, target)
        self._kept_rows[target] = self._kept_rows[source]

    def _read(self, sequence: Sequence, first: int, end: int) -> None:
        batch = self._batch([(sequence, first, sequence.tokens[first + 1 : end + 1].tolist())], is_scored=False)
        hidden = self._kept_rows.flatten(0, 1)[batch.step.slot_mapping]
        self._layer(batch.input_ids, batch.position_ids, hidden, batch.scored, batch.step)

    def _pass(self, sequences: Many[Sequence], ahead: int, token_ids: Many[int]) -> torch.Tensor:
        rows = [(one, one.length - 2 + ahead, [token_id]) for one, token_id in zip(sequences, token_ids, strict=True)]
        batch = self._batch(rows)
        if ahead:
            hidden = torch.stack([self._outputs[sequence] for sequence in sequences])
        else:
            hidden = self._kept_rows.flatten(0, 1)[batch.step.slot_mapping]
        logits, outputs = self._layer(batch.input_ids, batch.position_ids, hidden, batch.scored, batch.step)
        self._outputs = dict(zip(sequences, outputs, strict=True))
        return logits[:, : self._vocab]

    def _kept(self, drafts: list[int]) -> list[int]:
        """None: they were computed from outputs of the layer, not of the model."""
        return []
