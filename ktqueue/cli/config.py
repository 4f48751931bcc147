"""`ktqueue config`: every setting, its value, and where the value is from."""

import re
from typing import Annotated, Any

import typer

from ktqueue.cli.flags import AsJson, CommonFlags, EngineFlags, GatewayFlags, ProfileFlags, expand, settings, sources
from ktqueue.cli.terminal.console import results, table, write, write_json
from ktqueue.core.config import Config, all_settings
from ktqueue.core.settings.setting import Setting
from ktqueue.core.units import format_bytes

PASSWORD = re.compile(r"(?<=:)[^:@/]+(?=@)|(?<=password=)[^&]+")  # in a URL


@expand
def config(
    common: CommonFlags,
    engine: EngineFlags,
    gateway: GatewayFlags,
    profile: ProfileFlags,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write the tables of the reference page.")] = False,
) -> None:
    """Show each setting, its value, and where it is from: a flag, the environment, the file or the default."""
    if markdown:
        write(reference())
        return
    chosen = settings(common, engine=engine, gateway=gateway, profile=profile)
    origins = sources(common, engine=engine, gateway=gateway, profile=profile)
    rows = [
        (described, shown_value(described, chosen), origins.get(described.key, "default"))
        for described in all_settings()
    ]
    if as_json:
        write_json({described.key: {"value": value, "source": source} for described, value, source in rows})
        return
    shown = [(d.key, _words(d, value), "" if source == "default" else source) for d, value, source in rows]
    results().print(table(("setting", "value", "from"), shown), markup=False)


def reference() -> str:
    """The settings as Markdown, a table for each section: the generated part of docs/reference/configuration.md."""
    lines: list[str] = []
    section = ""
    for described in all_settings():
        if described.section != section:
            section = described.section
            title, see = SECTIONS[section]
            lines += ["", f"## `{section}`: {title}", *([see, ""] if see else [])]
            lines += ["| key | default | flag | meaning |", "| --- | --- | --- | --- |"]
        flags = ", ".join(f"`{flag.partition('/')[0]}`" for flag in described.about.flags)
        meaning = " ".join(filter(None, (described.about.help, described.about.details)))
        cells = (f"`{described.key}`", _default(described), flags, meaning)
        lines.append("|" + "".join(f" {cell.replace('|', '&#124;')} |" if cell else " |" for cell in cells))
    return "\n".join(lines[1:]) + "\n"


SECTIONS = {
    "broker": ("Redis and the promises kept in it", ""),
    "engine": ("one worker's engine", ""),
    "worker": ("how a worker ends", ""),
    "gateway": ("the HTTP server", ""),
    "bridge": ("jobs of arq clients", "See [arq](../guides/arq.md)."),
    "control": ("chores", "See [webhooks](../guides/webhooks.md) and [batches](../guides/batches.md)."),
    "storage": ("the bodies of files and batches", ""),
    "profile": ("what steps, tokens and requests took", "See [profile](../guides/profile.md)."),
    "log": ("what processes log", "See [logs](../guides/watching.md#logs)."),
}
"""Title and reference of each section, for the reference page."""


def shown_value(described: Setting, chosen: Config) -> Any:
    """Return the value of a setting without passwords and secrets."""
    value = getattr(getattr(chosen, described.section), described.name)
    if described.about.secret and value is not None:
        return "(set)"
    if described.name == "tenants":
        return [tenant.name for tenant in value]
    return PASSWORD.sub("***", value) if isinstance(value, str) and "://" in value else value


def _words(described: Setting, value: Any) -> str:
    if value is None:
        return described.about.shown or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return format_bytes(value) if described.is_size and value else str(value)


def _default(described: Setting) -> str:
    default = described.default
    if default is None or default == ():
        return described.about.shown if described.about.shown and described.key != "broker.url" else "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ", ".join(f"`{part}`" for part in default)
    if isinstance(default, int | float):
        return format_bytes(default).replace(".0 ", " ") if described.is_size and default else f"{default:g}"
    return f"`{default}`"
