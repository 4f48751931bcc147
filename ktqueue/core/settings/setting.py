"""One setting: its type, default, limits, choices, help and flag, in the metadata of a dataclass field.

The checks, the command line's flags, the file and the environment, `ktqueue config` and the reference page are all made
from this description.
"""

from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ktqueue.core.errors import ConfigError

_KEY = "ktqueue"

_LARGEST = {int: 1 << 53, float: 10**9}
"""Limits of numbers without one of their own. Beyond the first, Redis' scripts and readers of JSON round integers. The
second is 31 years in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What is known of a setting besides its name, type and default.

    help: one short sentence, for the command line. details: further sentences, for the reference page. shown: the
    default in words, if it is computed. none_word: the word for None, where it can be given. at_least, at_most, above:
    limits of a number, `above` excluded; without them it is never below 0. panel: the group of its flag in --help;
    without one it has no flag. flags: the flag's names, if it is not called as the setting. metavar: what its value is
    called. secret: it is never shown.
    """

    help: str
    details: str = ""
    shown: str | None = None
    none_word: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    panel: str = ""
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One described setting of a section. `type` is its type without None; `choices` are the values of a Literal."""

    section: str
    name: str
    type: Any
    optional: bool
    default: Any
    about: Description

    @property
    def key(self) -> str:
        """Its full name, such as engine.model."""
        return f"{self.section}.{self.name}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be; empty if it is not a word of a fixed list."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def is_size(self) -> bool:
        """Whether it counts bytes, so that it may be written like 256MiB."""
        return self.name.endswith("_bytes")

    def check(self, value: Any) -> None:
        """Raises ConfigError if the value is outside the limits, or is none of the choices."""
        if value is None:
            return
        about = self.about
        if value == "" and not self.choices:
            raise self.error("a text that is not empty", "not empty", value)
        if self.choices and value not in self.choices:
            raise self.error(f"one of {', '.join(self.choices)}", ", ".join(self.choices), value)
        if self.type in _LARGEST and isinstance(value, int | float):
            above, low, high = about.above, about.at_least or 0, about.at_most
            most = _LARGEST[self.type] if high is None else high
            if above is not None and not above < value <= most:
                raise self.error(f"above {above} and at most {most}", most, value)
            if high is not None and not low <= value <= high:
                raise self.error(f"a number from {low} to {high}", f"{low} to {high}", value)
            if value > most:
                raise self.error(f"a number of at most {most}", most, value)
            if above is None and not low <= value:  # NaN fails it too
                raise self.error(f"a number from {low} on", low, value)

    def error(self, wanted: str, limit: float | str, value: float | str) -> ConfigError:
        """The error for a wrong value."""
        return ConfigError.must_be(self.key, wanted, value, limit=limit)


def setting(default: Any, summary: str, *, secret: bool = False, **description: Any) -> Any:
    """A dataclass field with its description.

    `summary` is the short sentence for the command line; further keywords are those of `Description`. A `secret` is not
    in the dataclass's repr either.
    """
    about = Description(help=summary, secret=secret, **description)
    return field(default=default, repr=not secret, metadata={_KEY: about})


@cache
def settings_of(section: str, kind: Any) -> tuple[Setting, ...]:
    """The settings of a section's dataclass, in order."""
    hints = get_type_hints(kind)
    return tuple(_setting(section, described, hints[described.name]) for described in fields(kind))


def check_settings(section: str, config: Any) -> None:
    """Check every setting of a section. Raises ConfigError naming the key, its limit and its value."""
    kind: Any = type(config)
    for described in settings_of(section, kind):
        described.check(getattr(config, described.name))


def check_order(section: str, config: Any, smaller: str, larger: str) -> None:
    """Raise ConfigError if the setting `larger` of a section is below the setting `smaller`."""
    least, value = getattr(config, smaller), getattr(config, larger)
    if value < least:
        raise ConfigError.must_be(
            f"{section}.{larger}", f"a number from {least} on ({section}.{smaller})", value, limit=least
        )


def _setting(section: str, described: "Field[Any]", hint: Any) -> Setting:
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    is_union = get_origin(hint) not in (Literal, tuple) and len(get_args(hint)) > 1
    kind = kinds[0] if is_union else hint
    assert described.default is not MISSING
    about = described.metadata[_KEY]
    if about.panel and not about.flags:
        about = replace(about, flags=(f"--{described.name.replace('_', '-')}",))
    return Setting(section, described.name, kind, is_union, described.default, about)
