"""`ktqueue gateway`: only the HTTP server."""

import typer

from ktqueue.cli.flags import CommonFlags, GatewayFlags, ProfileFlags, expand, settings
from ktqueue.cli.terminal.failures import ExitCode


@expand
def gateway(common: CommonFlags, gateway: GatewayFlags, profile: ProfileFlags) -> None:
    """Serve the OpenAI-compatible HTTP API of a Redis. Needs no torch. Ctrl-C lets open streams finish."""
    from ktqueue.core.logs import set_up_logging
    from ktqueue.gateway.serve import serve

    config = settings(common, gateway=gateway, profile=profile)
    set_up_logging(config.log)
    try:
        serve(config)
    except SystemExit as end:  # the application could not start, which uvicorn has logged
        raise typer.Exit(ExitCode.FAILED if end.code else ExitCode.OK) from end
