"""EncodedPrompt: the prompt of a request as the model reads it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The prompt's token ids, and the text that they were made from, which is empty if the request has token ids."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
