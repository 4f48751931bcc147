"""`ktqueue`: registers the commands, and turns their errors into one line and an exit code.

The commands' modules import only typer and core at the top, so that `ktqueue --help` is quick.
"""

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from ktqueue import __version__
from ktqueue.cli.terminal.failures import EXIT_CODES_HELP, ExitCode, report

SERVING, USING, MODELS = "Serve", "Use", "Models and machine"
# The panel of the help, a module in this folder, and its function. `application` has commands of its own.
COMMANDS = {
    "up": (SERVING, "up", "up"),
    "down": (SERVING, "up", "down"),
    "gateway": (SERVING, "gateway", "gateway"),
    "worker": (SERVING, "worker", "worker"),
    "bridge": (SERVING, "arq", "bridge"),
    "control": (SERVING, "arq", "control"),
    "keys": (SERVING, "keys", "application"),
    "submit": (USING, "submit", "submit"),
    "top": (USING, "top", "top"),
    "jobs": (USING, "jobs", "application"),
    "batch": (USING, "batch.batch", "application"),
    "chat": (USING, "chat.chat", "chat"),
    "demo": (USING, "demo.demo", "demo"),
    "convert": (MODELS, "convert", "convert"),
    "imatrix": (MODELS, "imatrix", "imatrix"),
    "pull": (MODELS, "pull", "pull"),
    "fit": (MODELS, "fit", "fit"),
    "inspect": (MODELS, "inspect_model", "inspect"),
    "bench": (MODELS, "bench.bench", "application"),
    "profile": (MODELS, "profile", "profile"),
    "config": (MODELS, "config", "config"),
    "doctor": (MODELS, "doctor", "doctor"),
}


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"ktqueue {__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (at any place in the line).")] = False,
) -> None:
    """A job queue that serves Mixture-of-Experts language models too big for the GPU at hand."""


def application(first: str = "") -> typer.Typer:
    """The command tree; only the command `first` if there is one, since all of them take 50 ms."""
    app = typer.Typer(
        name="ktqueue",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=EXIT_CODES_HELP,
    )
    app.callback()(_root)
    for name in [first] if first in COMMANDS else COMMANDS:
        panel, module, function = COMMANDS[name]
        found = getattr(import_module(f"ktqueue.cli.{module}"), function)
        if function == "application":
            app.add_typer(found(), name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(found)
    return app


def _usage(error: Any) -> ExitCode:
    """Report a wrong command line. typer's error has a context with the command's name."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "ktqueue"
    message = " ".join(error.format_message().split()).replace(": Value error, ", ": ").rstrip(".")  # pydantic's words
    if message:  # empty if the help was shown instead
        sys.stderr.write(f"{command}: {message} (see {command} --help)\n")
    return ExitCode.USAGE


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in ours
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # None if it was closed: >&-
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    rest = [word for word in ours if word != "--debug"] + arguments[len(ours) :]
    try:
        code = application(rest[0] if rest else "")(args=rest, prog_name="ktqueue", standalone_mode=False)
        return int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # usage errors of typer, whose package differs between versions
            return _usage(error)
        return report(error, debug=debug)
