"""`ktqueue bench`: its commands."""

import typer

from ktqueue.cli.bench.engine import engine
from ktqueue.cli.bench.experts import experts
from ktqueue.cli.bench.serve import serve
from ktqueue.cli.terminal.failures import EXIT_CODES_HELP


def application() -> typer.Typer:
    """The commands of `ktqueue bench`."""
    app = typer.Typer(no_args_is_help=True, help="Measure this machine, or a server.", epilog=EXIT_CODES_HELP)
    app.callback()(lambda: None)
    app.command("experts")(experts)
    app.command("engine")(engine)
    app.command("serve")(serve)
    return app
