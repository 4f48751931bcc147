"""Log probabilities for the client, of the model's own distribution: before logit edits and temperature.

If the choice has a grammar, they are those of the tokens that it allows.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from ktqueue.core.events import PositionLogprobs, TokenLogprob

_LOWEST = -9999.0  # instead of -inf, which JSON does not have


def logprobs(
    logits: NDArray[np.float32], chosen: int, alternatives: int, token_bytes: Callable[[int], bytes]
) -> PositionLogprobs:
    """The chosen token and the `alternatives` most likely tokens of one position, best first.

    `logits`: [vocab] float32, not edited.
    """
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    alternatives = min(alternatives, len(wide))
    top = np.argpartition(-wide, alternatives - 1)[:alternatives] if alternatives else np.empty(0, dtype=np.int64)
    return position_logprobs(chosen, float(wide[chosen]), top, wide[top], alternatives, token_bytes)


def position_logprobs(
    chosen: int,
    chosen_logprob: float,
    ids: NDArray[np.int64],
    values: NDArray[np.float64],
    alternatives: int,
    token_bytes: Callable[[int], bytes],
) -> PositionLogprobs:
    """The chosen token and the `alternatives` most likely tokens of `ids`, whose log probabilities are `values`.

    Of equally likely tokens, the lowest id comes first. Tokens that a grammar does not allow have no entry.
    """

    def token(token_id: int, value: float) -> TokenLogprob:
        return TokenLogprob(token_id, token_bytes(token_id), max(value, _LOWEST))

    order = [place for place in np.lexsort((ids, -values))[:alternatives].tolist() if values[place] > -np.inf]
    alternative_tokens = tuple(token(int(ids[place]), float(values[place])) for place in order)
    return PositionLogprobs(token(chosen, chosen_logprob), alternative_tokens)


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """The logarithm of each row's softmax, [rows, vocab] float64."""
    wide = logits.double()
    wide -= wide.amax(dim=1, keepdim=True)
    return wide.sub_(wide.exp().sum(dim=1, keepdim=True).log_())


def forced_logprobs(token_id: int, alternatives: int, token_bytes: Callable[[int], bytes]) -> PositionLogprobs:
    """The log probabilities of a token that the grammar forces: it is certain, and there is no other."""
    token = TokenLogprob(token_id, token_bytes(token_id), 0.0)
    return PositionLogprobs(token, (token,) if alternatives else ())
