"""Compiles grammars in a separate process first, because a short grammar may take hours and all memory.

llguidance limits most of the work but not all of it: `multipleOf` with a large prime takes minutes. The process uses a
vocabulary of single bytes, for which the work depends on the grammar alone. A grammar that passes is compiled again
for the model's vocabulary, in a thread.

This module is also a program (`python -m ktqueue.answers.grammar_process`): each line on its standard input is JSON, a
grammar and whether only to read it. It is answered by one line on standard output.
"""

import atexit
import functools
import re
import resource
import sys
import threading
from collections import OrderedDict
from threading import Lock
from typing import BinaryIO

from ktqueue.answers.grammar import byte_compiler, check
from ktqueue.answers.grammar_errors import GrammarRefused
from ktqueue.core.codec import dumps, loads
from ktqueue.core.line_process import (
    MEMORY_BYTES,
    LineProcess,
    LineProcesses,
    NoAnswer,
    NotStarted,
    TooLate,
    limit_process,
)

MODULE = "ktqueue.answers.grammar_process"
CPU_SECONDS = 2  # of one grammar; those of real schemas take milliseconds
WALL_SECONDS = 20.0  # of one grammar, on a machine that is also busy with other work
STACK_BYTES = 1 << 20  # half of what the worker's threads have at least: 2 MiB where the main thread has no limit
REMEMBERED = 1024  # verdicts
_COUNT = re.compile(r"[{,](\d{10,})(?=[,}])")  # a large number of repetitions
# The library's words for a count that is too large in a pattern or in a rule, and the largest possible one.
_MOST_REPETITIONS = {"decimal literal invalid": (1 << 32) - 1, "number too large to fit": (1 << 31) - 1}
_UNKNOWN_TOKEN = "unknown special token"  # the library's words; only a model's vocabulary has such tokens


class GrammarProcesses:
    """Checks grammars with limits, and remembers the last REMEMBERED verdicts. Safe to call from several threads.

    `only_read`: grammars are read, which takes a millisecond, but not compiled.

    At most one process per thread that checks at the same time. They are kept until `close`.
    """

    def __init__(self, wall_seconds: float = WALL_SECONDS, *, only_read: bool = False) -> None:
        self._wall_seconds = wall_seconds
        self._only_read = only_read
        self._processes = LineProcesses(lambda: LineProcess(MODULE, b""))
        self._verdicts: OrderedDict[int, str] = OrderedDict()  # by hash of the grammar; "" means that it is good
        self._gate = Lock()

    def known(self, grammar: str) -> bool:
        """Whether `check` answers without work."""
        return hash(grammar) in self._verdicts

    def check(self, grammar: str, param: str = "grammar") -> None:
        """Raise GrammarRefused, for the field `param`, if the grammar is wrong or takes too much time or memory."""
        key = hash(grammar)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._ask(grammar, param)
            with self._gate:
                self._verdicts[key] = verdict
                while len(self._verdicts) > REMEMBERED:
                    self._verdicts.popitem(last=False)
        if verdict:
            raise GrammarRefused(verdict, param)

    def close(self) -> None:
        """End all processes."""
        self._processes.close()

    def _ask(self, grammar: str, param: str) -> str:
        """The verdict, to be remembered. Raises GrammarRefused if there is none."""
        try:
            verdict: str = loads(self._processes.ask(dumps([grammar, self._only_read]) + b"\n", self._wall_seconds))
        except NotStarted:
            raise
        except TooLate as error:  # the machine is busy: the process ends by itself after CPU_SECONDS of work
            raise GrammarRefused(str(error), param) from None
        except NoAnswer:
            memory, stack = f"{MEMORY_BYTES >> 20} MiB", f"{STACK_BYTES >> 20} MiB of stack"
            verdict = f"it takes more than {CPU_SECONDS} seconds, {memory}, or {stack} to compile"
        return _explained(verdict, grammar)


def _explained(reason: str, grammar: str) -> str:
    """The library's reason, or a clearer one where it does not say what is wrong."""
    for words, most in _MOST_REPETITIONS.items():
        if words in reason:
            counts = (count.lstrip("0") for count in _COUNT.findall(grammar))
            large = next((count for count in counts if len(count) > 10 or int(count) > most), "more")
            return f"a part may be repeated at most {most} times, got {large[:40]}"
    return reason


def check_syntax(grammar: str) -> None:
    """Read a grammar without a vocabulary. Raises GrammarRefused.

    Not in this process: a few short grammars, such as that of the constant -9223372036854775807, overflow the stack.
    """
    _readers().check(grammar)


@functools.cache
def _readers() -> GrammarProcesses:
    processes = GrammarProcesses(only_read=True)
    atexit.register(processes.close)
    return processes


def _verdict(grammar: str, only_read: bool) -> str:
    """The reason why a grammar is refused, empty if it is good."""
    try:
        if only_read:
            check(grammar)
        else:
            byte_compiler().compile(grammar)
    except GrammarRefused as refused:
        if _UNKNOWN_TOKEN not in refused.reason:
            return refused.reason
        try:
            check(grammar)
        except GrammarRefused as wrong:
            return wrong.reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _serve(lines: BinaryIO, answers: BinaryIO) -> None:
    while line := lines.readline():
        _allow_cpu_seconds(CPU_SECONDS)
        answers.write(dumps(_verdict(*loads(line))) + b"\n")
        answers.flush()


def _allow_cpu_seconds(seconds: int) -> None:
    """End this process when it has used so much more CPU time. The kernel counts whole seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds + 1, resource.RLIM_INFINITY))


def main() -> None:
    """Check grammars until standard input ends, in a thread with a small stack."""
    limit_process()
    byte_compiler()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
