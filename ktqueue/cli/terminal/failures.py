"""Exit codes, how an error becomes one line on standard error, and which extra has a missing package.

Errors of core and of the system have a message for users. Any other error is a bug, and the line says so.
"""

import sys
import traceback
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path

from ktqueue.core.errors import CheckpointError, ConfigError, InvalidRequest, KtqueueError, RuleError, Unavailable

MODULES = {
    "gateway": ("uvicorn", "starlette", "httptools", "prometheus_client", "python_multipart"),
    "worker": ("torch", "transformers", "gguf", "ktqueue_kernels"),
    "arq": ("arq",),
    "s3": ("boto3",),
}
"""Modules that show that an extra is installed. Modules of several extras are not listed."""


class ExitCode(IntEnum):
    """The process's exit status."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


WRONG_PATHS = FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError
EXIT_CODES_HELP = (
    "Exit codes: 0 ok, 1 failed, 2 wrong usage, settings or input, 3 server not reachable, 130 interrupted."
)


class UsageFault(KtqueueError):
    """The user's input is wrong: a flag, a file, or a line of input."""

    code = "usage"


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code for an error."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, Unavailable):
        return ExitCode.UNREACHABLE
    if isinstance(error, UsageFault | InvalidRequest | ConfigError | CheckpointError | RuleError | WRONG_PATHS):
        return ExitCode.USAGE
    return ExitCode.FAILED


def line(error: BaseException) -> str:
    """Describe an error in one line; only a list of errors has several."""
    if isinstance(error, KtqueueError):
        text = error.message
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, ModuleNotFoundError) and error.name is not None:
        text = f"this needs the package {error.name}: {_installation(_extra_with(error.name))}"
    elif isinstance(error, ImportError):
        text = str(error)
    else:
        text = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
    return "\n  ".join(" ".join(part.split()) for part in text.splitlines() if part.strip())


def report(error: BaseException, *, debug: bool) -> ExitCode:
    """Write the error to standard error, with its traceback if `debug`, and return its exit code."""
    if debug:
        traceback.print_exception(error)
    if not isinstance(error, KeyboardInterrupt):
        sys.stderr.write(f"ktqueue: {line(error)}\n")
    return exit_code(error)


def _extra_with(module: str) -> str:
    """Return the extra that provides a missing module; `worker` if the module is not listed."""
    return next((extra for extra, modules in MODULES.items() if module.partition(".")[0] in modules), "worker")


def _installation(*extras: str) -> str:
    """Return the command that installs the extras. In a clone the kernels are a separate folder."""
    names = ",".join(extras)
    kernels = "./csrc " if "worker" in extras else ""
    return f"pip install 'ktqueue[{names}]' (in a clone: pip install {kernels}'.[{names}]')"


def check_output(path: Path) -> None:
    """Raise UsageFault if no file can be made at `path`. Call it before the work, so that no result is lost."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageFault(f"{path} cannot be written: it is a folder, or its folder does not exist")


def require(*extras: str) -> None:
    """Raise ModuleNotFoundError, with the command that installs them, if any of the extras is missing."""
    missing = [extra for extra in extras if not all(find_spec(module) for module in MODULES[extra])]
    if missing:
        raise ModuleNotFoundError(f"this needs packages that are not installed: {_installation(*missing)}")
