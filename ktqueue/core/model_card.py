"""Model card: what a worker publishes about the model that it serves."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SHORT_DIGEST = 12  # characters of a digest in tables and messages


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A served model. `max_model_len` is in tokens (prompt and completion); `created` in Unix seconds.

    `digest`: hash of everything that decides the model's tokens (see loading/identity.py), in hexadecimal. Only a
    worker with the same digest continues a job that has started. Empty: unknown, from workers before version 0.2.
    `aliases` are other names under which clients may ask for the model. `sampling_defaults` are values of
    SamplingParams for requests that leave them out, from the model's generation_config.json. `tool_parser` and
    `reasoning_parser` name the formats of its tool calls and reasoning (ktqueue/answers); empty: it has none.
    `force_thinking`: chats whose request does not say otherwise begin inside the model's reasoning.
    """

    name: str
    created: int
    max_model_len: int
    vocab_size: int
    architecture: str
    quantization: str
    max_num_seqs: int
    digest: str = ""
    longest_token: int | None = None  # most bytes of text that a token may have; None: unknown
    aliases: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    tool_parser: str = ""
    reasoning_parser: str = ""
    force_thinking: bool = False

    @property
    def short_digest(self) -> str:
        """The beginning of the digest, for people."""
        return self.digest[:SHORT_DIGEST]
