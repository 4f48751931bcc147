"""`ktqueue`: registers the commands, and turns their errors into one line and an exit code.

The commands' modules import only typer and core at the top, so that `ktqueue --help` is quick.
"""

import os
import sys
from typing import Annotated, Any

import typer

from ktqueue import __version__
from ktqueue.cli import (
    arq,
    config,
    convert,
    doctor,
    fit,
    gateway,
    imatrix,
    inspect_model,
    jobs,
    keys,
    profile,
    pull,
    submit,
    top,
    up,
    worker,
)
from ktqueue.cli.batch import batch
from ktqueue.cli.bench import bench
from ktqueue.cli.chat import chat
from ktqueue.cli.demo import demo
from ktqueue.cli.terminal.failures import EXIT_CODES_HELP, ExitCode, report


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


def application() -> typer.Typer:
    """The command tree."""
    app = typer.Typer(
        name="ktqueue",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=EXIT_CODES_HELP,
    )
    app.callback()(_root)
    serving, using, models = "Serve", "Use", "Models and machine"
    app.command("up", rich_help_panel=serving)(up.up)
    app.command("down", rich_help_panel=serving)(up.down)
    app.command("gateway", rich_help_panel=serving)(gateway.gateway)
    app.command("worker", rich_help_panel=serving)(worker.worker)
    app.command("bridge", rich_help_panel=serving)(arq.bridge)
    app.command("control", rich_help_panel=serving)(arq.control)
    app.add_typer(keys.application(), name="keys", rich_help_panel=serving)
    app.command("submit", rich_help_panel=using)(submit.submit)
    app.command("top", rich_help_panel=using)(top.top)
    app.add_typer(jobs.application(), name="jobs", rich_help_panel=using)
    app.add_typer(batch.application(), name="batch", rich_help_panel=using)
    app.command("chat", rich_help_panel=using)(chat.chat)
    app.command("demo", rich_help_panel=using)(demo.demo)
    app.command("convert", rich_help_panel=models)(convert.convert)
    app.command("imatrix", rich_help_panel=models)(imatrix.imatrix)
    app.command("pull", rich_help_panel=models)(pull.pull)
    app.command("fit", rich_help_panel=models)(fit.fit)
    app.command("inspect", rich_help_panel=models)(inspect_model.inspect)
    app.add_typer(bench.application(), name="bench", rich_help_panel=models)
    app.command("profile", rich_help_panel=models)(profile.profile)
    app.command("config", rich_help_panel=models)(config.config)
    app.command("doctor", rich_help_panel=models)(doctor.doctor)
    return app


def _usage(error: Any) -> ExitCode:
    """Report a wrong command line. typer's error has a context with the command's name."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "ktqueue"
    message = " ".join(error.format_message().split())
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
        code = application()(args=rest, prog_name="ktqueue", standalone_mode=False)
        return int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # usage errors of typer, whose package differs between versions
            return _usage(error)
        return report(error, debug=debug)
