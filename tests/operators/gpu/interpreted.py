"""Operations by their kernels, which Triton's interpreter runs on CPU tensors; and compiled for an H200 (sm_90)."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest
import torch

from ktqueue.operators.gpu.kernels.operation import kernels_on_any_device

P = ParamSpec("P")
R = TypeVar("R")


def by_kernel(operation: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
    """Call `operation` with its kernel instead of its twin. Skips where a GPU is: there, tests/gpu runs the kernels."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled on this machine: tests/gpu")
    with kernels_on_any_device():
        return operation(*arguments, **named)


def by_twin(operation: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
    """Call `operation`, which computes CPU tensors by its twin."""
    return operation(*arguments, **named)


def compiled_for_h200(topic: str, cache: Path) -> list[str]:
    """Compile the kernels of a topic of sm_90.py in another process, and return the names of those it launched.

    The interpreter accepts what the compiler refuses: types, widths, names that change their type. `cache`: a folder
    for what Triton compiles.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": ".", "TRITON_CACHE_DIR": str(cache)}
    path = Path(__file__).with_name("sm_90.py")
    command = [sys.executable, str(path), topic]
    done = subprocess.run(command, env=environment, cwd=path.parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(done.stdout).split()
