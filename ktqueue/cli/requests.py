"""Flags and texts of `submit` and `chat` that become a GenerationRequest."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ktqueue.cli.terminal.failures import UsageFault
from ktqueue.core.codec import CodecError, loads
from ktqueue.core.request import SamplingParams

MAX_INPUT_BYTES = 64 << 20

SystemMessage = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="A system message.", show_default=False)
]


def _option(name: str, say: str, metavar: str = "X", default: str | bool = False) -> Any:
    return typer.Option(name, help=say, metavar=metavar, show_default=default, rich_help_panel="Sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen. The fields have the names of SamplingParams."""

    max_tokens: Annotated[int | None, _option("--max-tokens", "Most tokens to generate.", "N", "the context")] = None
    temperature: Annotated[float | None, _option("--temperature", "0 is greedy.", "X", "1.0")] = None
    top_p: Annotated[float | None, _option("--top-p", "Keep the likeliest tokens up to this mass.")] = None
    top_k: Annotated[int | None, _option("--top-k", "Keep this many likeliest tokens.", "N")] = None
    min_p: Annotated[float | None, _option("--min-p", "Drop tokens below this share of the likeliest.")] = None
    repetition_penalty: Annotated[float | None, _option("--repetition-penalty", "Above 1: repeat less.")] = None
    seed: Annotated[int | None, _option("--seed", "Same seed, same text.", "N")] = None
    stop: Annotated[list[str] | None, _option("--stop", "End before this text; may be repeated.", "TEXT")] = None

    def params(self, **more: Any) -> SamplingParams:
        """Make the SamplingParams. Flags that were not used keep the default. Raises InvalidRequest."""
        chosen = {name: value for name, value in {**asdict(self), **more}.items() if value is not None}
        chosen["stop"] = tuple(chosen.get("stop") or ())
        return SamplingParams(**chosen)


def read_text(source: str) -> str:
    """Return the text. `-` reads standard input, `@FILE` reads a file. Raises UsageFault."""
    try:
        if source == "-":
            raw = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        elif source.startswith("@"):
            with Path(source[1:]).open("rb") as file:
                raw = file.read(MAX_INPUT_BYTES + 1)
        else:
            return source
        if len(raw) > MAX_INPUT_BYTES:
            raise UsageFault(f"{source}: longer than {MAX_INPUT_BYTES >> 20} MiB")
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageFault(f"{source}: {getattr(error, 'strerror', None) or error}") from error


def read_messages(source: str) -> tuple[Mapping[str, Any], ...]:
    """Read chat messages from JSON text (see `read_text`). Raises UsageFault."""
    try:
        value = loads(read_text(source))
    except CodecError as error:
        raise UsageFault(f"--messages: {error.message} (a file is @FILE)") from error
    if isinstance(value, dict) and "messages" in value:
        value = value["messages"]
    if not isinstance(value, list):
        raise UsageFault("--messages must be a JSON list of objects with role and content")
    return tuple(value)
