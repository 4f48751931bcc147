"""`ktqueue inspect`: what a model is made of and where each part would go."""

from ktqueue.cli.flags import AsJson, CommonFlags, EngineFlags, expand


@expand
def inspect(common: CommonFlags, engine: EngineFlags, as_json: AsJson = False) -> None:
    """Show the plan of a model: module, operator, device, bytes."""
