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
    alternatives = min(alternatives, len(wide))
    top = np.argpartition(-wide, alternatives - 1)[:alternatives] if alternatives else np.empty(0, dtype=np.int64)
    return told_logprobs(chosen, float(wide[chosen]), top, wide[top], alternatives, token_bytes)


def told_logprobs(
    chosen: int,
    own: float,
    ids: NDArray[np.int64],
    values: NDArray[np.float64],
    alternatives: int,
    token_bytes: Callable[[int], bytes],
) -> PositionLogprobs:
    """For one position: the chosen token with its log probability `own`, and the likeliest `alternatives` of `ids` with
    their log probabilities `values`. Among equals the lowest id comes first."""

    def one(token_id: int, value: float) -> TokenLogprob:
        return TokenLogprob(token_id, token_bytes(token_id), max(value, _LEAST))

    order = np.lexsort((ids, -values))[:alternatives].tolist()
    return PositionLogprobs(one(chosen, own), tuple(one(int(ids[at]), float(values[at])) for at in order))
