"""Texts whose tokens are scored, in windows, and what is summed over these tokens."""

import hashlib
import lzma
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is scored. `name` is that of its file without .xz, `bytes` and `sha256` are those of its content."""

    name: str
    bytes: int
    sha256: str
    content: str

    @classmethod
    def read(cls, path: Path) -> "Text":
        """Read a file, which may be an .xz file."""
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        return cls(path.name.removesuffix(".xz"), len(raw), hashlib.sha256(raw).hexdigest(), raw.decode())

    def __str__(self) -> str:
        return f"`{self.name}` ({self.bytes} bytes, sha256 {self.sha256})"

    def windows(self, encode: Callable[[str], list[int]], count: int, window: int) -> list[list[int]]:
        """Return the text's beginning as windows of tokens. Raises SystemExit if it is too short."""
        ids = encode(self.content[: 16 * count * window])
        if len(ids) < count * window:
            raise SystemExit(f"{self.name} is too short for {count} windows")
        return [ids[i * window : (i + 1) * window] for i in range(count)]


@dataclass(slots=True)
class Sums:
    """What is summed over all scored tokens of one way to compute them, beside the expected way."""

    tokens: int = 0
    loss: float = 0.0
    more: float = 0.0  # loss than the expected way's
    squares: float = 0.0
    divergence: float = 0.0
    same: int = 0

    def add(self, found: torch.Tensor, expected: torch.Tensor, targets: torch.Tensor) -> None:
        """Add tokens. found, expected: log probabilities [tokens, vocabulary]; targets: [tokens] int64."""
        more = (expected - found).gather(1, targets[:, None]).double()
        self.tokens += len(targets)
        self.loss -= float(found.gather(1, targets[:, None]).double().sum())
        self.more += float(more.sum())
        self.squares += float(more.square().sum())
        self.divergence += float((expected.exp() * (expected - found)).double().sum())
        self.same += int((expected.argmax(-1) == found.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        """That of the tokens so far."""
        return math.exp(self.loss / self.tokens)

    def figure(self, usual: float) -> dict[str, float]:
        """`change` and its standard error in percent of `usual`, the perplexity of the expected way."""
        variance = self.squares / self.tokens - (self.more / self.tokens) ** 2
        return {
            "perplexity": self.perplexity,
            "change": 100 * (self.perplexity / usual - 1),
            "error": 100 * math.sqrt(max(0.0, variance) / self.tokens),
            "kl": self.divergence / self.tokens,
            "same": 100 * self.same / self.tokens,
        }
