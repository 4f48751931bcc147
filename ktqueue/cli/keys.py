"""`ktqueue keys`: make API keys. A key is shown once, when it is made; the settings contain its hash."""

import secrets
from typing import Annotated

import typer

from ktqueue.cli.flags import AsJson
from ktqueue.cli.terminal.console import write, write_json
from ktqueue.cli.terminal.failures import EXIT_CODES_HELP
from ktqueue.core.tenants import TenantConfig, hash_of

KEY_BYTES = 32  # random bytes of a key: too many to guess, so a plain SHA-256 is enough


def application() -> typer.Typer:
    """The commands of `ktqueue keys`."""
    app = typer.Typer(no_args_is_help=True, help="Make API keys.", epilog=EXIT_CODES_HELP)
    app.callback()(_noun)
    app.command("new")(new)
    return app


def _noun() -> None:
    """Make API keys."""


def new(
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="The tenant that owns the key.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and show it once, with the settings that accept it."""
    key = f"ktq-{secrets.token_urlsafe(KEY_BYTES)}"
    hashed = hash_of(key)
    if tenant is not None:
        TenantConfig(name=tenant, keys=(hashed,))  # raises ConfigError for a name that the gateway would refuse
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

The key is shown only now: give it to its user. Put its hash into the gateway's settings (--config FILE.toml):

{lines}

To see the hash of a key, and whether a gateway accepts it:
  printf %s "$KEY" | sha256sum
  curl -H "Authorization: Bearer $KEY" http://127.0.0.1:8000/v1/models
"""
    )
