"""Settings of profiles: where processes write what their steps, tokens and requests took."""

from dataclasses import dataclass

from ktqueue.core.settings.setting import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """A folder for profiles, and how large they become. Sizes in bytes, times in seconds."""

    folder: str | None = setting(
        None,
        "Write what each step and token took to files in this folder.",
        shown="off",
        details="Several workers and gateways may share it. `ktqueue profile DIR` reads it.",
        flags=("--profile",),
        metavar="DIR",
        panel="Profile",
    )
    file_bytes: int = setting(64 << 20, "Size at which a process begins another file.", at_least=4096)
    files: int = setting(
        8, "Files of each kind that a process keeps. Older ones of the same process are deleted.", at_least=1
    )
    routing_seconds: float = setting(
        1.0, "How often the uses of each expert are written, if the model counts them.", at_least=0.01
    )

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        check_settings("profile", self)
