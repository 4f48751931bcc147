"""Model card: what a worker publishes about the model that it serves."""

from dataclasses import dataclass

SHORT_DIGEST = 12  # characters of a digest in tables and messages


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A served model. `max_model_len` is in tokens (prompt and completion); `created` in Unix seconds.

    `digest`: hash of everything that decides the model's tokens (see loading/identity.py), in hexadecimal. Only a
    worker with the same digest continues a job that has started. Empty: unknown, from workers before version 0.2.
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

    @property
    def short_digest(self) -> str:
        """The beginning of the digest, for people."""
        return self.digest[:SHORT_DIGEST]
