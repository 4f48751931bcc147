"""Opens the store that the settings name."""

from pathlib import Path

from ktqueue.core.config import StorageConfig
from ktqueue.core.errors import ConfigError
from ktqueue.storage.folder import FolderStore
from ktqueue.storage.store import Store


def open_store(config: StorageConfig, state_dir: str | Path) -> Store:
    """The store at `storage.location`, by default the folder `files` in `state_dir`. Raises ConfigError."""
    if config.bucket is None:
        location = Path(state_dir) / "files" if config.location is None else Path(config.location)
        return FolderStore(location, config.min_free_bytes)
    try:
        from ktqueue.storage.s3 import S3Store  # a large library, which few need
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"storage.location {config.location} needs the package {error.name}: pip install 'ktqueue[s3]'",
            param="storage.location",
            value=config.location,
        ) from error
    return S3Store(*config.bucket)
