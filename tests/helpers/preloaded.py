"""Starts processes of `ktqueue` without the seconds that foreign imports take: as forks of a process that has them.

Such a process has its own id, parent, arguments, environment, folder, files, session and signals, as after an exec, and
imports all of our modules itself. Only foreign packages are there already. A start that sets variables that they might
read, passes more files, or runs no module of ours, is an exec as ever.
"""

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ADOPTED_SECONDS = 30.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
OURS = (
    "KTQUEUE_", "PYTEST_", "PYTHONPATH", "OMP_NUM_THREADS", "COLUMNS",
    "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR",  # set by tokenizers and torch
)  # fmt: skip
"""Beginnings of variables that no foreign package reads when it is imported, or that have no effect here."""
MODULES = (
    "ktqueue.cli.main", "ktqueue.cli.http_client", "ktqueue.gateway.serve", "ktqueue.workers.supervision.supervisor",
    "ktqueue.workers.supervision.fork_server", "transformers.models.qwen3_moe.modeling_qwen3_moe",
)  # fmt: skip
SMALL = ("ktqueue.answers.grammar_process", "ktqueue.loading.tokenizer.template_process")
"""They limit their memory to as much as the foreign packages have, and import few of them."""
prctl = ctypes.CDLL(None).prctl


def foreign(environment: dict[str, str]) -> dict[str, str]:
    """The variables that foreign packages may read."""
    return {name: value for name, value in environment.items() if not name.startswith(OURS)}


@contextmanager
def preloaded() -> Iterator[None]:
    """Let `subprocess` and asyncio start our modules as forks, which are children of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    paths = os.pathsep.join(path for path in sys.path if path)
    with theirs:
        environment = {**foreign(dict(os.environ)), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        server = subprocess.Popen([sys.executable, "-P", __file__], stdin=theirs.fileno(), env=environment)
    execute: Any = subprocess._fork_exec  # type: ignore[attr-defined]
    gate = threading.Lock()  # threads start processes, too

    def start(words: list[Any], *rest: Any) -> int:
        """Start a process. `rest`: what CPython's subprocess passes on. Returns the process id."""
        _, _, kept, folder, given, stdin, _, _, stdout, _, stderr, _, errors, _, session, *_ = rest
        umask, prepare = rest[19:21]
        variables = dict(os.environ)
        if given is not None:
            variables = dict(line.split("=", 1) for line in map(os.fsdecode, given))
        module = [str(word) for word in words[1:] if word != "-P"]
        is_ours = words[0] == sys.executable and module[0] == "-m" and module[1].startswith("ktqueue")
        is_ours = is_ours and module[1] not in SMALL
        if not is_ours or foreign(variables) != foreign(environment) or set(kept) != {errors}:
            return int(execute(words, *rest))
        order = {
            "words": module[1:],
            "safe_path": "-P" in words,
            "variables": variables,
            "folder": str(folder or Path.cwd()),
            "umask": umask,
            "session": session,
            "parent": os.getpid(),
            "dies": prepare is not None,  # with its parent: nothing else is ever prepared
        }
        files = [number if file < 0 else file for number, file in enumerate((stdin, stdout, stderr))]
        with gate:
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # it becomes the parent of the server's orphans
            try:
                socket.send_fds(ours, [json.dumps(order).encode()], files)
                return int(ours.recv(32))
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    with ours, mock.patch("subprocess._fork_exec", start):
        yield
    server.wait()


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork a process for each order. Returns in these processes only, with their order."""
    while True:
        data, files, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not data:
            sys.exit()
        reading, writing = os.pipe()
        if (middle := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                break
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)  # from here on the process is a child of the tests
        control.send(os.read(reading, 32))
        for file in (reading, writing, *files):
            os.close(file)
    control.detach()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 256)
    order: dict[str, Any] = json.loads(data)
    return order


def become(order: dict[str, Any]) -> None:
    """Do for this process what an exec and the start of Python would have done."""
    end = time.monotonic() + ADOPTED_SECONDS
    while os.getppid() != order["parent"]:
        if time.monotonic() > end:
            sys.exit("the process that started this one is gone")
        time.sleep(0.001)
    if order["dies"]:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if order["session"]:
        os.setsid()
    if order["umask"] >= 0:
        os.umask(order["umask"])
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["variables"])
    sys.path[:0] = order["variables"].get("PYTHONPATH", "").split(os.pathsep)
    if not order["safe_path"]:
        sys.path.insert(0, order["folder"])
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())
    sys.argv[1:] = order["words"][1:]


def run(module: str) -> None:
    """Run a module as the main one. At the end of its exit, after all functions of `atexit`, nothing is taken apart."""
    codes: list[int] = []

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if codes:
            os._exit(*codes)

    at_exit.append(leave)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        codes.append(0)
    except SystemExit as exit_:
        if isinstance(exit_.code, int | None):
            codes.append(exit_.code or 0)
        raise


if __name__ == "__main__":
    at_exit: list[Callable[[], None]] = []
    atexit.register(lambda: [leave() for leave in at_exit])  # before all others, so it is called after them
    channel = socket.socket(fileno=0)
    for imported in MODULES:
        importlib.import_module(imported)
    for name in [name for name in sys.modules if name.split(".")[0] == "ktqueue"]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()
    told = serve(channel)
    become(told)
    run(told["words"][0])
