"""The parts of an answer: reasoning, text and tool calls, in the order in which the model writes them.

A stream has many pieces of each part. Pieces of the same kind that follow each other belong to the same part.
"""

from collections.abc import Iterable
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


def joined(parts: Iterable[AnswerPart]) -> tuple[AnswerPart, ...]:
    """The same parts, with neighbouring pieces of one part joined."""
    merged: list[AnswerPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, AnswerText) and isinstance(last, AnswerText):
            merged[-1] = AnswerText(last.text + part.text)
        elif isinstance(part, AnswerReasoning) and isinstance(last, AnswerReasoning):
            merged[-1] = AnswerReasoning(last.text + part.text)
        elif isinstance(part, AnswerToolCall) and isinstance(last, AnswerToolCall) and part.place == last.place:
            merged[-1] = AnswerToolCall(
                last.place, last.name or part.name, last.arguments + part.arguments, last.id or part.id
            )
        else:
            merged.append(part)
    return tuple(merged)
