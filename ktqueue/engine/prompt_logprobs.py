"""Log probabilities of the prompt's tokens, from the logits of the tokens before them.

They are computed in the steps that compute the prompt. The scheduler limits the rows of logits of a step, so memory
does not grow with the prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ktqueue.core.events import PositionLogprobs
from ktqueue.engine.logits import Logits
from ktqueue.engine.logprobs import log_probabilities, position_logprobs
from ktqueue.engine.sequence import Sequence

_ROWS_AT_ONCE = 16  # of float64, which take 8 bytes per token of the vocabulary each


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The tokens of one sequence whose logits give log probabilities of its prompt.

    `positions` in the prompt: the logits of position p concern token p + 1. `rows` of the step's logits, as many.
    """

    sequence: Sequence
    positions: range
    rows: range


def prompt_logprobs(
    logits: Logits, scored: PromptRows, token_bytes: Callable[[int], bytes]
) -> tuple[PositionLogprobs, ...] | None:
    """The log probabilities of tokens `positions` + 1, by the model's own distribution.

    `logits`: [rows of the step, vocab] float32 on any device, not edited. Returns None if they are not finite numbers.
    """
    request = scored.sequence.request
    alternatives = min(request.sampling.prompt_logprobs or 0, logits.shape[1])
    found: list[PositionLogprobs] = []
    with torch.inference_mode():
        for start in range(0, len(scored.rows), _ROWS_AT_ONCE):
            rows, positions = (
                scored.rows[start : start + _ROWS_AT_ONCE],
                scored.positions[start : start + _ROWS_AT_ONCE],
            )
            part = logits[rows.start : rows.stop]
            chosen = request.prompt[positions.start + 1 : positions.stop + 1].astype("int64")
            wide = log_probabilities(part)
            columns = torch.cat(
                [torch.from_numpy(chosen).to(part.device)[:, None], part.topk(alternatives, dim=1).indices], dim=1
            )
            values = wide.gather(1, columns).cpu().numpy()
            ids = columns.cpu().numpy()
            if not (values[:, 0] == values[:, 0]).all():  # a row with a NaN or an infinity has NaN everywhere
                return None
            found += [
                position_logprobs(
                    int(ids[row, 0]), float(values[row, 0]), ids[row, 1:], values[row, 1:], alternatives, token_bytes
                )
                for row in range(len(rows))
            ]
    return tuple(found)
