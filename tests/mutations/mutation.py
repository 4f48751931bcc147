"""An edit that breaks a promise, and the tests that must then fail."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = "ktqueue/broker/lua"


@dataclass(frozen=True)
class Mutation:
    """An edit of the file at `path`: `old`, which is there exactly once, becomes `new`. Then each of `tests` fails.

    `tests` are pytest ids. The name of a mutation says what is wrong after the edit.
    """

    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Edit the tree at `root`. Returns the file's old text. Raises ValueError unless `old` is in it once."""
        file = root / self.path
        text = file.read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.path} has {count} times, not once: {self.old!r}")
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return text
