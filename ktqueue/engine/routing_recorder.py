"""RoutingRecorder: collects which experts each generated token chose, in parts of sequences."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ktqueue.engine.batch import Batch
from ktqueue.engine.sequence import Sequence, SequenceStatus

SEGMENT = 128  # tokens of a part
MOST_SEGMENTS = 512

Choices = npt.NDArray[np.uint16]
"""[tokens, layers, chosen] experts, highest weight first. Layers: those with routed experts."""


@runtime_checkable
class RecordsChoices(Protocol):
    """A model that can say which experts the tokens of a step chose."""

    def record_choices(self, tokens: int) -> None:
        """Record from now on, in steps of at most so many tokens. Call it between `load` and the device's preparation.

        Raises ValueError if the model has no routed experts, or if its layers choose different numbers of them.
        """

    def choices(self, scored: npt.NDArray[np.int64], tokens: int) -> Choices:
        """The experts of the scored tokens of the last step, which had so many tokens. It must be complete."""


class RoutingRecorder:
    """Collects SEGMENT tokens of a sequence that follow each other, and then the next ones.

    A sequence that ends, or whose next token is not recorded, leaves the rest of its last part out. segments: at most
    MOST_SEGMENTS. Knows no file.
    """

    def __init__(self, model: RecordsChoices) -> None:
        self._model = model
        self._parts: dict[Sequence, list[Choices]] = {}
        self._next: dict[Sequence, int] = {}  # positions
        self.segments: list[Choices] = []

    def add(self, batch: Batch, ready: Iterable[tuple[int, Sequence, int]]) -> None:
        """Add the last step. `ready`: rows of the logits that give a token, their sequence, and how many drafts are
        before the token. Drafts are left out."""
        rows = [(row, sequence) for row, sequence, ahead in ready if not ahead]
        if not rows or len(self.segments) >= MOST_SEGMENTS:
            return
        found = self._model.choices(batch.scored.numpy(), batch.input_ids.shape[1])
        for row, sequence in rows:
            position = sequence.num_computed_tokens - 1
            if self._next.get(sequence) != position:
                self._parts[sequence] = []
            self._next[sequence] = position + 1
            part = self._parts[sequence]
            part.append(found[row])
            if len(part) == SEGMENT:
                if len(self.segments) < MOST_SEGMENTS:
                    self.segments.append(np.stack(part))
                self._parts[sequence] = []
        for sequence in [known for known in self._next if known.status is SequenceStatus.FINISHED]:
            del self._parts[sequence], self._next[sequence]
