"""The state folder of `ktqueue up`: private to its user, used by one `ktqueue up` at a time. Starts nothing.

It holds prompts and answers (Redis's append-only file, logs) and a password, so nobody else may read it. `up.lock` is
locked by the process that runs here. The kernel knows who that is and forgets it with the process, so neither a file
that a crash left behind nor a process id that was given away again can mislead anybody.
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
# What older versions left open to others.
PRIVATE_PATTERNS = ("*.log", "*.log.1", "*.aof", "*.rdb", "*.jsonl", "appendonlydir", "appendonlydir/*")
OWN_FILES = ("lock", LOCK_NAME, "gateway.log")  # a folder that holds one of them is a state folder
_FLOCK = "hhqqi"  # struct flock of fcntl(2): type, whence, start, length, process id


class StateFolder:
    """Made and made private by `open`, held by one process from `hold` to `release`.

    One process is not kept from holding the same folder twice: the lock is the process's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @classmethod
    def open(cls, state_dir: str | Path) -> "StateFolder":
        """Make the folder if need be, and close it to others. Raises ConfigError that names the setting."""
        path = Path(state_dir).absolute()
        try:
            path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            _make_private(path)
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(0, "it cannot be written to")
        except OSError as error:
            raise ConfigError(
                f"broker.state_dir {path}: {error.strerror}; "
                "choose another folder with --state-dir DIR or KTQUEUE_BROKER_STATE_DIR",
                param="broker.state_dir",
                value=str(path),
            ) from error
        return cls(path)

    def hold(self) -> None:
        """Keep the folder for this process, until `release` or its end. Raises ConfigError where another one has it."""
        lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                f"`ktqueue up` already runs on {self.path} (process {holder(self.path)}): stop it with `ktqueue down "
                f"--state-dir {self.path}`, or give this one a folder of its own with --state-dir",
                param="broker.state_dir",
                value=str(self.path),
            ) from None
        self._lock = lock

    def release(self) -> None:
        """Let others have it. Does nothing the second time."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def holder(state_dir: str | Path) -> int | None:
    """The id of the process that runs `ktqueue up` on the folder now; None where there is none."""
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
    """Close a state folder to others, and its files. A folder that held other things before stays as it is."""
    if any(path.iterdir()) and not any((path / name).exists() for name in OWN_FILES):
        return
    if not path.stat().st_mode & stat.S_ISVTX:  # not /tmp and its like
        _close_to_others(path)
    for pattern in PRIVATE_PATTERNS:
        for child in path.glob(pattern):
            _close_to_others(child)


def _close_to_others(path: Path) -> None:
    found = path.lstat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode):
        path.chmod(stat.S_IMODE(found.st_mode) & ~0o077)
