"""The flags that several commands share, and how flags, environment and file become one Config.

A command takes a group of flags as one parameter; `expand` shows its fields to typer one by one. The fields of a group
are the settings of a section that have a flag, so a group is also the overrides of its section.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from ktqueue.core.config import (
    BrokerConfig,
    Config,
    EngineConfig,
    GatewayConfig,
    ProfileConfig,
    config_sources,
    load_config,
)
from ktqueue.core.settings.setting import Setting, settings_of

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A .gguf file, a Hugging Face folder, hf:OWNER/NAME[:QUANT], or demo.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Settings; KTQUEUE_* variables and flags override them.",
        show_default=False,
        metavar="FILE.toml",
        rich_help_panel="Settings",
    ),
]


class FlagGroup:
    """A frozen dataclass with a field for each flag; None: not given."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...


def _group(section: str, kind: type, **further: Any) -> Callable[[type[FlagGroup]], type[FlagGroup]]:
    """Decorate a FlagGroup: its fields are `further` annotations, and the flags of a section's settings."""

    def decorate(group: type[FlagGroup]) -> type[FlagGroup]:
        annotations = {s.name: _annotation(s) for s in settings_of(section, kind) if s.about.flags}
        flag_class = make_dataclass(
            group.__name__,
            [(name, hint, field(default=None)) for name, hint in {**further, **annotations}.items()],
            bases=(FlagGroup,),
            frozen=True,
            kw_only=True,
        )
        flag_class.__doc__, flag_class.__module__ = group.__doc__, group.__module__
        return flag_class

    return decorate


def _annotation(described: Setting) -> Any:
    about, default = described.about, described.default
    words = {"True": "on", "False": "off"}
    shown = about.shown if default is None or default == () else words.get(str(default), str(default))
    shown = "none asked" if described.key == "gateway.api_keys" else shown
    is_number = described.type in (bool, int, float) and not described.is_size and about.none_word is None
    kind: Any = described.type if is_number else str
    if described.type == tuple[str, ...]:
        kind = list[str]  # a flag that can be repeated
    option = typer.Option(
        *about.flags, help=about.help, show_default=shown or False, metavar=about.metavar, rich_help_panel=about.panel
    )
    return Annotated[kind | None, option]


@_group("broker", BrokerConfig, config=ConfigFile)
class CommonFlags(FlagGroup):
    """Where the settings and Redis are."""


@_group("engine", EngineConfig)
class EngineFlags(FlagGroup):
    """The model and the engine that runs it."""


@_group("gateway", GatewayConfig)
class GatewayFlags(FlagGroup):
    """The HTTP server."""


@_group("profile", ProfileConfig)
class ProfileFlags(FlagGroup):
    """Where a profile is written."""


def settings(common: CommonFlags, **groups: FlagGroup) -> Config:
    """The Config of this process: defaults, file, environment, flags. `groups` have the names of their sections.

    Raises ConfigError.
    """
    return load_config(common.config, os.environ, _overrides(common, groups))


def sources(common: CommonFlags, **groups: FlagGroup) -> dict[str, str]:
    """Where each setting that is not a default is from, by its key. Raises ConfigError."""
    return config_sources(common.config, os.environ, _overrides(common, groups))


def _overrides(common: CommonFlags, groups: Mapping[str, FlagGroup]) -> dict[str, dict[str, Any]]:
    broker = _values(common)
    del broker["config"]
    return {"broker": broker, **{section: _values(group) for section, group in groups.items()}}


def _values(group: FlagGroup) -> dict[str, Any]:
    """The values of the flags by name. A repeated flag means the same as its values separated by commas."""
    values = asdict(group)
    return {name: (",".join(value) or None) if isinstance(value, list) else value for name, value in values.items()}


def expand(verb: Callable[..., None]) -> Callable[..., None]:
    """Show typer the fields of each flag group that the command `verb` takes as a parameter."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        kind = hints[name]
        if name not in groups:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        shown = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=shown[f.name])
            for f in fields(kind)
        ]

    @functools.wraps(verb)
    def wrapper(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{f.name: values.pop(f.name) for f in fields(kind)})
        verb(**values)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapper.__wrapped__
    return wrapper
