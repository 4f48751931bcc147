"""What a worker tells the world of the model that it serves."""

from dataclasses import dataclass

SHORT_DIGEST = 12  # characters of a digest that people are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A served model. `max_model_len` is in tokens (prompt and completion); `created` in Unix seconds.

    `digest`: of all that decides the model's tokens (see loading/identity.py), in hexadecimal. Only a worker with the
    same digest goes on with a job that has begun. Empty: unknown, as of workers before version 0.2.
    """

    name: str
    created: int
    max_model_len: int
    vocab_size: int
    architecture: str
    quantization: str
    max_num_seqs: int
    digest: str = ""
    longest_token: int | None = None  # bytes of text that one token may stand for; None: no limit is known

    @property
    def short_digest(self) -> str:
        """The digest as people are shown it."""
        return self.digest[:SHORT_DIGEST]
