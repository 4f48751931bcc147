"""`ktqueue chat`: a conversation in the terminal."""

import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktqueue.cli.console import results, write
from ktqueue.cli.failures import ExitCode, UsageFault, line
from ktqueue.cli.flags import CommonFlags, EngineFlags, expand, settings
from ktqueue.cli.model import with_model
from ktqueue.cli.requests import SamplingFlags
from ktqueue.cli.wrapped import Wrapped
from ktqueue.core.errors import KtqueueError
from ktqueue.core.hub_model import served_name
from ktqueue.core.request import SamplingParams

if TYPE_CHECKING:
    from ktqueue.cli.talkers import Talker
    from ktqueue.core.config import Config

HELP = "/reset starts anew   /exit or Ctrl-D leaves   Ctrl-C stops an answer"


@expand
def chat(
    common: CommonFlags,
    sampling: SamplingFlags,
    engine: EngineFlags,
    local: Annotated[bool, typer.Option("--local", help="Run the model in this process, without Redis.")] = False,
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", metavar="URL", help="Talk to this gateway over HTTP.", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", help="The gateway's key.", show_default=False)
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="A system message.", show_default=False)
    ] = None,
) -> None:
    """Talk with a model: through Redis, over HTTP (--base-url), or in this process (--local)."""
    if local and (base_url is not None or common.url is not None):
        raise UsageFault("--local goes with neither --base-url nor --redis-url")
    config = settings(common, engine=engine)
    params = sampling.params()
    talker = _talker(config, engine.model, local=local, base_url=base_url, api_key=api_key)
    conversation = Conversation(talker, params, system)
    try:
        with _quiet_control_characters():
            faults = conversation.run()
    finally:
        talker.close()
    if faults and not sys.stdin.isatty():
        raise typer.Exit(ExitCode.FAILED)


def _talker(config: "Config", model: str | None, *, local: bool, base_url: str | None, api_key: str | None) -> "Talker":
    from ktqueue.cli import talkers

    if local:
        return talkers.local_talker(with_model(config).engine)
    model = served_name(model) if model else None
    if base_url is not None:
        return talkers.HttpTalker(base_url, model, api_key)
    from ktqueue.cli.connection import client, only_model

    return talkers.RedisTalker(client(config), model or only_model(config))


class Conversation:
    """Reads turns, writes answers. On a terminal with a prompt and a line of numbers after each answer."""

    def __init__(self, talker: "Talker", sampling: SamplingParams, system: str | None) -> None:
        self._talker = talker
        self._sampling = sampling
        self._opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._opening)
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._faults = 0

    def run(self) -> int:
        """Until /exit or the end of the input; returns how many turns failed."""
        if self._terminal:
            import readline  # noqa: F401  (gives input() its line editing and history)

            self._aside(f"{self._talker.model}   {HELP}")
        while (said := self._read()) is not None:
            word = said.strip()
            if word in ("/exit", "/quit"):
                break
            if word == "/reset":
                self._messages = list(self._opening)
                self._aside("a new conversation")
            elif word.startswith("/") and " " not in word:
                self._aside(HELP)
            elif word:
                self._turn(said)
        return self._faults

    def _read(self) -> str | None:
        # \001 and \002 tell readline that what is between has no width
        prompt = "\001\033[1;36m\002> \001\033[0m\002" if self._terminal else ""
        while True:
            try:
                return input(prompt) if self._terminal else _line_of_input()
            except EOFError:
                write("\n")
                return None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                write("\n")
                self._aside("Ctrl-D or /exit leaves")

    def _turn(self, said: str) -> None:
        self._messages.append({"role": "user", "content": said})
        parts: list[str] = []
        tokens = 0
        began = time.monotonic()
        first: float | None = None
        note = ""
        page = Wrapped(results().width)
        try:
            for piece in self._talker.answer(self._messages, self._sampling):
                tokens += piece.tokens
                if piece.text:
                    first = first if first is not None else time.monotonic()
                    parts.append(piece.text)
                    page.add(piece.text) if self._terminal else write(piece.text)
        except KeyboardInterrupt:
            if not self._terminal:
                raise
            note = "stopped   "
        except KtqueueError as error:
            self._messages.pop()
            page.end()
            sys.stderr.write(f"ktqueue: {line(error)}\n")
            self._faults += 1
            return
        page.end()
        self._messages.append({"role": "assistant", "content": "".join(parts)})
        if first is not None:
            rate = tokens / max(time.monotonic() - began, 1e-9)
            numbers = f"{tokens} tokens, {rate:.0f} tok/s, " if tokens else ""
            note += f"{numbers}first after {first - began:.2f} s"
        self._aside(note)

    def _aside(self, text: str) -> None:
        if self._terminal and text:
            write(f"\033[2m{text}\033[0m\n")


def _line_of_input() -> str:
    text = sys.stdin.readline()
    if not text:
        raise EOFError
    return text.rstrip("\n")


@contextmanager
def _quiet_control_characters() -> Iterator[None]:
    """Keep the terminal from writing ^C into an answer."""
    if not sys.stdin.isatty():
        yield
        return
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    quiet = termios.tcgetattr(handle)
    quiet[3] &= ~termios.ECHOCTL
    termios.tcsetattr(handle, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
