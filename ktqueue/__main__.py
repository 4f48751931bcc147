"""The process of a command, `ktqueue ...` or `python -m ktqueue ...`. Ctrl-C never shows a traceback.

It raises KeyboardInterrupt in the command. While modules are imported, and after the command, there is nothing to clean
up, and it ends the process at once. So this module and the package import almost nothing at the top.
"""

import signal
import sys

from ktqueue.core import garbage

TYPE_CHECKING = False  # typing would be imported for it
if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import TracebackType

AGAIN_SECONDS = 0.01  # after which an ignored Ctrl-C is sent again


def main() -> None:
    """Run the command line of this process and exit with its code."""
    garbage.collect_seldom()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # a shell's background job ignores Ctrl-C
        from ktqueue.cli.main import run

        sys.exit(run(sys.argv[1:]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ktqueue.cli.main import run

    sys.excepthook, sys.unraisablehook = _report, _report_ignored
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(sys.argv[1:])
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def _report(kind: type[BaseException], error: BaseException, traceback: "TracebackType | None") -> None:
    """Write an error that nothing has caught. A second Ctrl-C, while the first is handled, has no text."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


def _report_ignored(ignored: "UnraisableHookArgs") -> None:
    """Write an error that Python ignores, or send a Ctrl-C again that came in a finaliser or the like."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    import os
    from threading import Timer

    Timer(AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()


if __name__ == "__main__":
    main()
