"""A test run ends with a list of the reasons for skipped tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOME_TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_on_the_moon(number):
    pytest.skip("this is not the moon")

@pytest.mark.skip(reason="it is night")
@pytest.mark.parametrize("number", range(2))
def test_by_day(number):
    pass

@pytest.mark.long
def test_at_length():
    pass

def test_here():
    pass
"""


def test_a_run_ends_with_a_line_for_each_reason(tmp_path: Path) -> None:
    """Tests whose marks say that they cannot run are counted too, though `make test` leaves them out."""
    (tmp_path / "test_some.py").write_text(SOME_TESTS)
    paths = [str(ROOT), str(ROOT / "tests" / "helpers")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--without-long", "-n", "1", "--rootdir", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-3:-1] == ["skipped 3: this is not the moon", "skipped 2: it is night"]
    assert "1 passed, 3 skipped" in done.stdout.splitlines()[-1]
