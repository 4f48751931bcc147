"""What a worker tells the world of the model that it serves."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A served model. `max_model_len` is in tokens (prompt and completion); `created` in Unix seconds."""

    name: str
    created: int
    max_model_len: int
    vocab_size: int
    architecture: str
    quantization: str
    max_num_seqs: int
    longest_token: int | None = None  # bytes of text that one token may stand for; None: no limit is known
