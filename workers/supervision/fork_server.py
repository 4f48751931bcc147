"""The fork server: a process that has loaded the model and forks a worker on request.

So a dead worker is replaced in a fraction of a second, whatever the size of the model, and the workers of a
machine share one copy of the weights. It serves models on the CPU only: a process that uses a device cannot be forked.
`fork_client.py` executes it as `python -m ktqueue.workers.supervision.fork_server`, with settings from the environment.

It speaks JSON lines over the socket that is its standard input. {"log": path} asks for a worker with that log file;
the answer is {"pid": id}. {"ended": id, "code": return code} reports the end of a worker. Workers die with this
process, and this process ends when the socket closes.
"""

from ktqueue.core import garbage

if __name__ == "__main__":
    garbage.collect_seldom()

import json
import os
import selectors
import signal
import socket
import warnings
from collections.abc import Callable
from typing import NoReturn

from ktqueue.broker.redis.state_folder import PRIVATE_FILE
from ktqueue.core.logs import configure_process
from ktqueue.workers.exit_codes import BROKEN, DRAINED, leave
from ktqueue.workers.supervision.process import die_with


class ForkServer:
    """Forks workers. `work`: what a worker does; it never returns. Use it in the main thread, without an event loop."""

    def __init__(self, control: socket.socket, work: Callable[[], NoReturn]) -> None:
        self._control = control
        self._work = work
        self._unread = b""  # the beginning of a line
        self._child_exits, self._wake = socket.socketpair()
        for side in (self._child_exits, self._wake):
            side.setblocking(False)

    def run(self) -> None:
        """Serve until the other side closes the socket."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            for source in (self._control, self._child_exits):
                selector.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._child_exits:
                        self._child_exits.recv(4096)
                        self._report_ends()
                    elif not self._answer():
                        return

    def _answer(self) -> bool:
        """Fork the workers that are asked for. Returns False if the supervisor has closed the socket."""
        data = self._control.recv(1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._send({"pid": self._fork(json.loads(line)["log"])})
        return bool(data)

    def _report_ends(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._send({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, int]) -> None:
        self._control.sendall(json.dumps(message).encode() + b"\n")

    def _fork(self, log_path: str) -> int:
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads. The child creates those of the kernels again (csrc/threads/thread_pool.cpp).
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._become_worker(parent, log_path)
        return pid

    def _become_worker(self, parent: int, log_path: str) -> NoReturn:
        try:
            die_with(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDONLY)
            sink = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE_FILE)
            for ours, standard in ((nothing, 0), (sink, 1), (sink, 2)):
                os.dup2(ours, standard)
            os.close(nothing)
            os.close(sink)
            self._control.detach()  # it was standard input
            self._child_exits.close()
            self._wake.close()
            self._work()
        finally:
            leave(BROKEN)  # never return into the parent's code


def main() -> NoReturn:
    """Load the model, then serve. Does not return; if loading fails, the exit code is that of a worker."""
    from ktqueue.answers.grammar import library_tokenizer  # these import torch, which takes seconds
    from ktqueue.workers.generation.worker_process import conclude, serve
    from ktqueue.workers.startup.build import build, set_threads

    control = socket.socket(fileno=0)

    def forks() -> int:
        config = configure_process(os.environ)
        built = build(config.engine)
        library_tokenizer(built.tokenizer, built.tokenizer.encode_plain)  # each worker's grammars need it
        garbage.settle()  # else each worker's garbage collector would touch, and so copy, the pages of old objects

        def worker() -> int:
            set_threads(config.engine)  # a fork has none of its parent's threads
            return serve(config, built)

        ForkServer(control, lambda: conclude(worker)).run()
        return DRAINED

    conclude(forks)


if __name__ == "__main__":
    main()
