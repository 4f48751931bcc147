"""`ktqueue keys`: API keys. A key is shown once, when it is made; the settings hold its hash."""

import secrets
from typing import Annotated

import typer

from ktqueue.cli.flags import AsJson
from ktqueue.cli.terminal.console import write, write_json
from ktqueue.cli.terminal.failures import EXIT_CODES_HELP
from ktqueue.core.tenants import TenantConfig, hash_of

KEY_BYTES = 32  # random ones in a key: no list of words holds it, so that one plain SHA-256 is enough


def application() -> typer.Typer:
    """The `keys` noun."""
    app = typer.Typer(no_args_is_help=True, help="Make API keys.", epilog=EXIT_CODES_HELP)
    app.callback()(_noun)
    app.command("new")(new)
    return app


def _noun() -> None:
    """Make API keys."""


def new(
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Whose key it is.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key: show it once, and the settings that let it in."""
    key = f"ktq-{secrets.token_urlsafe(KEY_BYTES)}"
    hashed = hash_of(key)
    if tenant is not None:
        TenantConfig(name=tenant, keys=(hashed,))  # a name that the gateway would refuse is refused here
    if as_json:
        write_json({"key": key, "sha256": hashed, "tenant": tenant})
        return
    lines = (
        f'[gateway]\napi_keys = ["{hashed}"]'
        if tenant is None
        else f'[[gateway.tenants]]\nname = "{tenant}"\nkeys = ["{hashed}"]'
    )
    write(
        f"""{key}

The key is shown this once: give it to its user. The gateway's settings (--config FILE.toml) take its hash:

{lines}

To see which hash belongs to a key, and whether a gateway takes it:
  printf %s "$KEY" | sha256sum
  curl -H "Authorization: Bearer $KEY" http://127.0.0.1:8000/v1/models
"""
    )
