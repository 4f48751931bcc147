"""The parts of an answer: reasoning, text and tool calls, in the order in which the model writes them.

A stream has many pieces of each part. Pieces of the same kind that follow each other belong to the same part.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerText:
    """New text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerReasoning:
    """New text that the model wrote for itself, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerToolCall:
    """A new piece of a tool call. The pieces of one call have the same `place`, counted from 0 in each choice.

    The first piece has the `name` of the function, and the later ones an empty name. The `arguments` of all pieces
    together are what the model wrote as JSON. `id` is the model's own name of the call, if its format has one.
    """

    place: int
    name: str
    arguments: str
    id: str = ""


AnswerPart = AnswerText | AnswerReasoning | AnswerToolCall


def joined(parts: Sequence[AnswerPart]) -> tuple[AnswerPart, ...]:
    """The same parts, with neighbouring pieces of one part joined. It takes time in proportion to the text."""
    if len(parts) < 2:
        return tuple(parts)
    return tuple(_join(list(pieces)) for _, pieces in itertools.groupby(parts, _which))


def _which(part: AnswerPart) -> tuple[type, int]:
    return type(part), part.place if isinstance(part, AnswerToolCall) else 0


def _join(pieces: list[AnswerPart]) -> AnswerPart:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, AnswerToolCall):
        calls = [piece for piece in pieces if isinstance(piece, AnswerToolCall)]
        name = next((call.name for call in calls if call.name), "")
        identity = next((call.id for call in calls if call.id), "")
        return AnswerToolCall(first.place, name, "".join(call.arguments for call in calls), identity)
    return type(first)("".join(piece.text for piece in pieces if not isinstance(piece, AnswerToolCall)))
