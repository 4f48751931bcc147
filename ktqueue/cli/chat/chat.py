"""`ktqueue chat`: a conversation in the terminal."""

import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ktqueue.cli.chat.input import Turns, no_echo
from ktqueue.cli.flags import CommonFlags, EngineFlags, ProfileFlags, expand, settings, sources
from ktqueue.cli.model import with_model
from ktqueue.cli.requests import SamplingFlags, SystemMessage
from ktqueue.cli.terminal.console import Wrapped, plain_text, results, write
from ktqueue.cli.terminal.failures import ExitCode, UsageFault, line
from ktqueue.core.errors import KtqueueError
from ktqueue.core.hub_model import served_name
from ktqueue.core.request import SamplingParams

if TYPE_CHECKING:
    from ktqueue.cli.chat.talkers import Talker
    from ktqueue.core.config import Config

HINT = "/help lists commands   Ctrl-C stops an answer   Ctrl-D ends the chat"
COMMAND = re.compile(r"/[a-z?]+( .*)?")  # not a message that begins with a path


@expand
def chat(
    common: CommonFlags,
    sampling: SamplingFlags,
    engine: EngineFlags,
    profile: ProfileFlags,
    local: Annotated[bool, typer.Option("--local", help="Run the model in this process, without Redis.")] = False,
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", metavar="URL", help="Talk to this gateway over HTTP.", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="KEY", help="The gateway's key.", show_default=False, envvar="OPENAI_API_KEY"
        ),
    ] = None,
    system: SystemMessage = None,
) -> None:
    """Talk with a model: through Redis, over HTTP (--base-url), or in this process (--local).

    Flags of the engine, except --model, need --local.
    """
    if local and (base_url is not None or common.url is not None):
        raise UsageFault("--local cannot be used with --base-url or --redis-url")
    given = sources(common, engine=engine, profile=profile)
    flags = (flag for key, flag in given.items() if key.startswith(("engine.", "profile.")) and flag.startswith("--"))
    if not local and (unused := next((flag for flag in flags if flag != "--model"), None)):
        raise UsageFault(f"{unused} needs --local, because otherwise a worker runs the model")
    config = settings(common, engine=engine, profile=profile)
    params = sampling.params()
    with no_echo():
        talker = _talker(config, engine.model, local=local, base_url=base_url, api_key=api_key)
        try:
            faults = Conversation(talker, params, system).run()
        finally:
            talker.close()
    if faults and not sys.stdin.isatty():
        raise typer.Exit(ExitCode.FAILED)


def _talker(config: "Config", model: str | None, *, local: bool, base_url: str | None, api_key: str | None) -> "Talker":
    from ktqueue.cli.chat import talkers

    if local:
        return talkers.local_talker(with_model(config))
    model = served_name(model) if model else None
    if base_url is not None:
        return talkers.HttpTalker(base_url, model, api_key)
    from ktqueue.cli.connection import client, only_model

    return talkers.RedisTalker(client(config), model or only_model(config))


class Conversation:
    """Reads turns and writes answers, on a terminal with a prompt and a line of figures after each answer."""

    def __init__(self, talker: "Talker", sampling: SamplingParams, system: str | None) -> None:
        from ktqueue.cli.chat.commands import Talk

        self._talker = talker
        self._talk = Talk(sampling, system)
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._turns = Turns(terminal=self._terminal)
        self._faults = 0

    def run(self) -> int:
        """Run until /exit or the end of the input. Returns the number of failed turns."""
        if self._terminal:
            self._show_dim(f"{self._talker.model}   {HINT}")
        while (text := self._read()) is not None:
            word = text.strip()
            if word in ("/exit", "/quit", "/bye"):
                break
            if COMMAND.fullmatch(word):
                self._command(word)
            elif word:
                self._turn(text)
        return self._faults

    def _read(self) -> str | None:
        while True:
            try:
                return self._turns.read()
            except EOFError:
                write("\n" * (not self._terminal))
                return None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                self._show_dim("Ctrl-D or /exit ends the chat")

    def _command(self, line: str) -> None:
        from ktqueue.cli.chat.commands import obey

        try:
            self._show_dim(obey(self._talk, line))
        except (KtqueueError, OSError) as error:
            self._fault(error)

    def _turn(self, question: str) -> None:
        talk = self._talk
        talk.messages.append({"role": "user", "content": question})
        parts: list[str] = []
        tokens = 0
        began = time.monotonic()
        first: float | None = None
        note = ""
        page = Wrapped(results().width)
        try:
            for piece in self._talker.answer(talk.all_messages, talk.sampling):
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
            talk.messages.pop()
            page.end()
            self._fault(error)
            return
        page.end()
        talk.messages.append({"role": "assistant", "content": "".join(parts)})
        if first is not None:
            rate = tokens / max(time.monotonic() - began, 1e-9)
            numbers = f"{tokens} tokens, {rate:.0f} tok/s, " if tokens else ""
            note += f"{numbers}first after {first - began:.2f} s"
        self._show_dim(note)

    def _fault(self, error: KtqueueError | OSError) -> None:
        sys.stderr.write(f"ktqueue: {line(error)}\n")
        self._faults += 1

    def _show_dim(self, text: str) -> None:
        if self._terminal and text:
            write(f"\033[2m{plain_text(text)}\033[0m\n")
