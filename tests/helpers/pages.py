"""The code blocks of our Markdown pages: their places, their languages, and what they need to run.

A block is fenced with its language, or indented by four spaces, which means shell. Two conventions, both visible to
readers: a comment such as `# needs a GPU` keeps its line from being run, or the whole block if it stands alone in the
block's first line; and a block whose first line is a file name in a comment, such as `# ktqueue.toml`, is that file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL, PYTHON = "sh", "python"
LANGUAGES = {SHELL, PYTHON, "toml", "yaml", "json", "text"}
REASONS = ("a clone", "a GPU", "an idle machine", "Docker", "the internet")

_FENCE = re.compile(r"( *)```(\w*)\s*$")
_NEEDS = re.compile(r"#.*\bneeds (?P<reason>.+)$")
_FILE = re.compile(r"# ([\w.-]+\.(?:py|toml|yaml|jsonl?))$")


@dataclass(frozen=True)
class Block:
    """A code block. `line`: number of its first line of code in the page, from 1."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """The place of the block, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs(self) -> str | None:
        """What the block needs that a test does not have."""
        first = self.text.partition("\n")[0]
        found = _NEEDS.match(first)
        return found["reason"] if found else None

    @property
    def file_name(self) -> str | None:
        """The name of the file that the block shows, from its first line."""
        found = _FILE.match(self.text.partition("\n")[0])
        return found[1] if found else None

    @cached_property
    def runnable(self) -> str:
        """The lines of the block that run anywhere."""
        lines = [] if self.needs else self.text.splitlines()
        return "".join(f"{line}\n" for line in lines if self.language != SHELL or not _NEEDS.search(line))

    def reasons(self) -> Iterator[str]:
        """Everything that lines of the block need."""
        for line in self.text.splitlines():
            if found := _NEEDS.search(line):
                yield found["reason"]

    def commands(self) -> Iterator[str]:
        """The shell commands of the block, each in one line without its comment."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if command := re.sub(r"(^|\s+)#.*", "", line).strip():
                yield command


def pages() -> list[Path]:
    """Return README.md, the pages of docs/, and the page about rule files."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "rules" / "README.md"]


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page from top to bottom."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    index = 0
    while index < len(lines):
        begin = index
        if fence := _FENCE.match(lines[index]):
            index += 1
            while lines[index].strip() != "```":
                index += 1
            code = [line.removeprefix(fence[1]) for line in lines[begin + 1 : index]]
            found.append(Block(page, begin + 2, fence[2], "\n".join(code) + "\n"))
        elif lines[index].startswith("    ") and (
            index == 0 or not lines[index - 1].strip() or lines[index - 1].startswith("#")
        ):
            while index + 1 < len(lines) and lines[index + 1].startswith("    "):
                index += 1
            code = [line[4:] for line in lines[begin : index + 1]]
            found.append(Block(page, begin + 1, SHELL, "\n".join(code) + "\n"))
        index += 1
    return found
