"""NextTokenDrafts: drafts of the layer behind a model's own that predicts the token after the next. See docs/adr/0064.

The model keeps the input of its head for each token, in the pages of the cache. The layer reads it there, beside the
token that follows, and has a cache of its own with the same pages. For further drafts its output takes the place of
what the model would have computed, so the layer writes it to the place of the next token. The model computes that
token when it verifies the drafts, and then overwrites it. Once drafts are verified, the layer computes their positions
again.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ktqueue.engine.draft_model import DraftModel, DraftSource
from ktqueue.engine.runner import Runner
from ktqueue.engine.token_selector import Selector
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import DecoderOutput


class NextTokenModel(Protocol):
    """Such a layer, called like a model. Of a token it reads what the model kept in its place. It writes its output
    behind each scored token, which is the last of its row.

    hidden: what is kept, [pages, page_size, hidden_size]. hidden_size: columns; hidden_dtype: their type.
    """

    hidden: torch.Tensor
    hidden_size: int
    hidden_dtype: torch.dtype

    def keep_hidden(self, hidden: torch.Tensor) -> None:
        """Let the model write the input of its head to `hidden`, and read it there."""

    def __call__(self, *_: Any, **inputs: Any) -> DecoderOutput:
        """See runner.Model."""


@dataclass(frozen=True, slots=True)
class NextTokenSource(DraftSource):
    """What NextTokenDrafts is made of: a DraftSource whose model is the layer."""

    model: NextTokenModel

    def keep_hidden(self, pages: int, device: str) -> None:
        """See DraftSource. On a device there is one page more, to which rows that pad a captured step write."""
        shape = pages, self.layout.page_size, self.model.hidden_size
        self.model.keep_hidden(torch.zeros(shape, dtype=self.model.hidden_dtype, device=device))

    def make(self, runner: Runner, kv: KVCache, selector: Selector, most_tokens: int) -> "NextTokenDrafts":
        return NextTokenDrafts(self, runner, kv, selector, most_tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return (
            self.layout.page_bytes + self.layout.page_size * self.model.hidden_size * self.model.hidden_dtype.itemsize
        )


class NextTokenDrafts(DraftModel):
    """A DraftModel whose place p has the token at p + 1."""

    unread = 2
    joined = 0  # the output of each row would overwrite what the model kept

    def __init__(
        self, source: NextTokenSource, runner: Runner, kv: KVCache, selector: Selector, most_tokens: int
    ) -> None:
        super().__init__(source, runner, kv, selector, most_tokens)
        self._layer = source.model

    def copy_page(self, source: int, target: int) -> None:
        super().copy_page(source, target)
        self._layer.hidden[target] = self._layer.hidden[source]

    def _kept(self, drafts: list[int]) -> list[int]:
        """None: they were computed from outputs of the layer, not of the model."""
        return []
