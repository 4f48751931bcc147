"""The state folder of `ktqueue up`: private to its user, used by one `ktqueue up` at a time.

It contains prompts and answers (Redis's append-only file, logs) and a password, so other users must not read it. The
running process locks `up.lock`. The kernel knows the lock's owner and releases it with the process, so a file that a
crash left behind, or a reused process id, cannot mislead anyone.
"""

import fcntl
import os
import stat
import struct
from pathlib import Path

from ktqueue.core.errors import ConfigError

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
PRIVATE_UMASK = 0o077
LOCK_NAME = "up.lock"
# Files that older versions left readable for others.
PRIVATE_PATTERNS = ("*.log", "*.log.1", "*.aof", "*.rdb", "*.jsonl", "appendonlydir", "appendonlydir/*")
OWN_FILES = ("lock", LOCK_NAME, "gateway.log")  # a folder with one of these is a state folder
_FLOCK = "hhqqi"  # struct flock of fcntl(2): type, whence, start, length, process id


class StateFolder:
    """Created and made private by `open`; one process owns it from `hold` to `release`.

    The lock belongs to the process, so it does not stop one process from holding the folder twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @classmethod
    def open(cls, state_dir: str | Path) -> "StateFolder":
        """Create the folder if necessary and make it private. Raises ConfigError that names the setting."""
        path = Path(state_dir).absolute()
        try:
            path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            _make_private(path)
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(0, "it is not writable")
        except OSError as error:
            raise ConfigError(
                f"broker.state_dir {path}: {error.strerror}; "
                "choose another folder with --state-dir DIR or KTQUEUE_BROKER_STATE_DIR",
                param="broker.state_dir",
                value=str(path),
            ) from error
        return cls(path)

    def hold(self) -> None:
        """Lock the folder until `release` or the process's exit. Raises ConfigError if another process has it."""
        lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                f"`ktqueue up` already runs on {self.path} (process {holder(self.path)}): stop it with `ktqueue down "
                f"--state-dir {self.path}`, or choose another folder with --state-dir",
                param="broker.state_dir",
                value=str(self.path),
            ) from None
        self._lock = lock

    def release(self) -> None:
        """Unlock the folder. A second call does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def holder(state_dir: str | Path) -> int | None:
    """The id of the process that runs `ktqueue up` on the folder now, or None."""
    try:
        lock = os.open(Path(state_dir) / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(lock, fcntl.F_GETLK, asked)[: struct.calcsize(_FLOCK)])
        return pid if kind != fcntl.F_UNLCK else None
    finally:
        os.close(lock)


def _make_private(path: Path) -> None:
    """Make a state folder and its files private. A folder that contains other things is left unchanged."""
    if any(path.iterdir()) and not any((path / name).exists() for name in OWN_FILES):
        return
    if not path.stat().st_mode & stat.S_ISVTX:  # not /tmp or similar
        _close_to_others(path)
    for pattern in PRIVATE_PATTERNS:
        for child in path.glob(pattern):
            _close_to_others(child)


def _close_to_others(path: Path) -> None:
    found = path.lstat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
        path.chmod(stat.S_IMODE(found.st_mode) & ~0o077)
