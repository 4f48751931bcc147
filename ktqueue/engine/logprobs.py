"""Log probabilities that are told to the client: of the model's own distribution, before any edit or temperature."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ktqueue.core.events import PositionLogprobs, TokenLogprob

_LEAST = -9999.0  # in place of -inf, which JSON can't carry


def logprobs(
    logits: NDArray[np.float32], chosen: int, alternatives: int, token_bytes: Callable[[int], bytes]
) -> PositionLogprobs:
    """For one position: the chosen token and the likeliest `alternatives`, best first. `logits` [vocab], not edited."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())

    def one(token_id: int) -> TokenLogprob:
        return TokenLogprob(token_id, token_bytes(token_id), max(float(wide[token_id]), _LEAST))

    if alternatives == 0:
        return PositionLogprobs(one(chosen))
    alternatives = min(alternatives, len(wide))
    top = np.argpartition(-wide, alternatives - 1)[:alternatives]
    top = top[np.lexsort((top, -wide[top]))]
    return PositionLogprobs(one(chosen), tuple(one(int(token_id)) for token_id in top))
