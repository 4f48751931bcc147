"""EncodedPrompt: the prompt of a request as the model reads it."""

from dataclasses import dataclass, field

from ktqueue.answers.grammar import Matcher


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The prompt's token ids, and its text, which is empty if the request has token ids and wants no text.

    `bad_words`: token ids of each spelling of the words that must not appear in the answer. `pieces`: bytes of each
    token, if the request wants them. `matcher`: at the beginning of the grammar that the answer must match. `opening`:
    the beginning of the answer that the prompt already contains, if readers of the answer must know it.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    pieces: tuple[bytes, ...] = ()
    matcher: Matcher | None = None
    opening: str = ""
