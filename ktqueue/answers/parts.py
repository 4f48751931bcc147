"""The parts of an answer: reasoning, text and tool calls, in the order in which the model writes them.

A stream has many pieces of each part. Pieces of the same kind that follow each other belong to the same part.
"""

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
    together are JSON.
    """

    place: int
    name: str
    arguments: str


AnswerPart = AnswerText | AnswerReasoning | AnswerToolCall
