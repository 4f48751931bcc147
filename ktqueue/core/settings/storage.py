"""Settings of the store for files and batches, and of what clients may keep there."""

from dataclasses import dataclass

from ktqueue.core.settings.setting import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """The store. Times in seconds, sizes in bytes."""

    location: str | None = setting(
        None,
        "Folder of uploaded files and of what batches write.",
        details="All gateways and control workers of an installation use the same one.",
        shown="`files` in `broker.state_dir`",
    )
    min_free_bytes: int = setting(
        1 << 30, "Nothing is written while the folder's file system has less free space.", at_least=0
    )

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        check_settings("storage", self)
