"""`ktqueue bench`: its commands."""

import typer

from ktqueue.cli.bench.engine import engine
from ktqueue.cli.bench.experts import experts
from ktqueue.cli.bench.serve_flags import LoadFlags, PromptFlags, ResultFlags, ServerFlags
from ktqueue.cli.flags import expand
from ktqueue.cli.terminal.failures import EXIT_CODES_HELP


@expand
def serve(server: ServerFlags, load: LoadFlags, prompts: PromptFlags, result: ResultFlags) -> None:
    """Measure any OpenAI-compatible server under load: first token, gaps, end to end, throughput, failures.

    Flags and figures have the names of `vllm bench serve`. Without flags, 100 prompts of random words are sent at once.
    No two share a beginning, and each run has new ones, so that no prefix cache helps. Ctrl-C shows what was measured.
    """
    from ktqueue.cli.bench.serve_session import run

    run(server, load, prompts, result)


def application() -> typer.Typer:
    """The commands of `ktqueue bench`."""
    app = typer.Typer(no_args_is_help=True, help="Measure this machine, or a server.", epilog=EXIT_CODES_HELP)
    app.callback()(lambda: None)
    app.command("experts")(experts)
    app.command("engine")(engine)
    app.command("serve")(serve)
    return app
