"""A short run of fuzz_gguf.py with a fixed seed. `make fuzz` runs it for FUZZ_SECONDS, differently each time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = 1_500
ROOT = Path(__file__).parents[3]


def fuzz(*arguments: object) -> str:
    """Return what the program prints. If it fails, show its errors."""
    program = Path(__file__).with_name("fuzz_gguf.py")
    done = subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
def test_any_bytes_are_a_header_or_a_checkpoint_error(tiny_gguf: Path, tmp_path: Path) -> None:
    seconds = os.environ.get("FUZZ_SECONDS")
    if seconds:
        fuzz(tiny_gguf, "seconds", seconds, tmp_path)
    else:
        assert 0 < int(fuzz(tiny_gguf, "cases", CASES, 1)) < CASES
