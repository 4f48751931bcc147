"""What the command lines of all benchmarks share."""

import argparse
import os
import shutil
from pathlib import Path

from benchmarks.results import RESULTS


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as it is written."""


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows `--results`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=_HelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return parser


def add_cpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--threads` and `--llama-python`."""
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    peer = os.environ.get("LLAMA_PYTHON") or None
    parser.add_argument("--llama-python", type=program, default=peer, help="one with llama-cpp-python, to compare with")


def program(text: str) -> str:
    """The name or path of a program that can be run. Raises argparse.ArgumentTypeError for any other."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"there is no program {text!r}")
    return text


def integers(text: str) -> list[int]:
    """The numbers of a list with commas; none of an empty text."""
    return [int(number) for number in text.split(",") if number]
