"""How much of the host's memory a hand-off takes. Pinned, so it is no one else's, and no page of it can be swapped."""

from ktqueue.operators.native_handoff import LINE

SLOTS = 2
"""Tasks that there is room for: the CPU works on one while the GPU fills the other."""


def input_bytes(hidden: int, experts_per_token: int, max_tokens: int) -> int:
    """Of a slot's input, as csrc/handoff/handoff.h lays it out: of each pair its expert's id and weight and a guess of
    the next layer's, of each token x in float32; and what may lie between, since x and the guesses begin on a line."""
    return 20 * max_tokens * experts_per_token + 128 + 4 * max_tokens * hidden


def output_bytes(hidden: int, max_tokens: int) -> int:
    """Of a slot's output: [max_tokens, hidden] float32."""
    return 4 * max_tokens * hidden


def word_bytes(slots: int) -> int:
    """Of the words of all slots, a line each, wherever their memory begins."""
    return (2 * slots + 1) * LINE


def pinned_bytes(hidden: int, experts_per_token: int, max_tokens: int, *, slots: int = SLOTS) -> int:
    """Of a whole hand-off, as it is taken from the host: torch pins memory in powers of two."""
    of_each = input_bytes(hidden, experts_per_token, max_tokens), output_bytes(hidden, max_tokens)
    return sum(1 << (size - 1).bit_length() for size in (word_bytes(slots), *(of_each * slots)))
