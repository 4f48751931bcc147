"""A store in a folder."""

from pathlib import Path

import pytest

from ktqueue.storage.folder import FolderStore
from ktqueue.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return FolderStore(tmp_path)
