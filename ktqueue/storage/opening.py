"""Opens the store that the settings name."""

from pathlib import Path

from ktqueue.core.config import StorageConfig
from ktqueue.storage.folder import FolderStore
from ktqueue.storage.store import Store


def open_store(config: StorageConfig, state_dir: str | Path) -> Store:
    """The store at `storage.location`, by default the folder `files` in `state_dir`."""
    root = Path(state_dir) / "files" if config.location is None else Path(config.location)
    return FolderStore(root, config.min_free_bytes)
