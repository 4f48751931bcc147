"""Opens the store that the settings name."""

import re
from pathlib import Path

from ktqueue.core.config import StorageConfig
from ktqueue.core.errors import ConfigError
from ktqueue.storage.folder import FolderStore
from ktqueue.storage.store import Store

_S3 = re.compile(
    r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*))?/?"
)


def open_store(config: StorageConfig, state_dir: str | Path) -> Store:
    """The store at `storage.location`, by default the folder `files` in `state_dir`. Raises ConfigError."""
    location = config.location
    if location is None:
        return FolderStore(Path(state_dir) / "files", config.min_free_bytes)
    if "://" not in location:
        return FolderStore(Path(location), config.min_free_bytes)
    match = _S3.fullmatch(location)
    if match is None:
        raise ConfigError(
            f"storage.location must be a folder or s3://BUCKET[/PREFIX], got {location!r}",
            param="storage.location",
            limit="s3://BUCKET[/PREFIX]",
            value=location,
        )
    try:
        from ktqueue.storage.s3 import S3Store  # a large library, which few need
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"storage.location {location} needs the package {error.name}: pip install 'ktqueue[s3]'",
            param="storage.location",
            value=location,
        ) from error
    prefix = match["prefix"]
    return S3Store(match["bucket"], f"{prefix}/" if prefix else "")
