"""`ktqueue gateway`: the HTTP front alone."""

from ktqueue.cli.flags import CommonFlags, GatewayFlags, expand, settings


@expand
def gateway(common: CommonFlags, gateway: GatewayFlags) -> None:
    """Serve the OpenAI-compatible HTTP API in front of a Redis. Needs no torch."""
    from ktqueue.gateway.serve import serve

    serve(settings(common, gateway=gateway))
