"""Processes of an installed ktqueue import no modules from the current folder, whatever their names."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.installed

Run = Callable[..., subprocess.CompletedProcess[str]]


def _lines(path: Path, count: int) -> None:
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    path.write_text("".join(json.dumps({"custom_id": f"c{number}", **line}) + "\n" for number in range(count)))


def test_up_and_a_batch_ignore_modules_of_the_folder(
    run: Run, installed_bin: Path, trapped: Path, state_dir: Path
) -> None:
    _lines(trapped / "in.jsonl", 3)
    done = run(
        installed_bin / "ktqueue", "batch", "run", "in.jsonl", "-o", "out.jsonl", "--state-dir", state_dir, cwd=trapped
    )
    assert done.returncode == 0, done.stderr
    assert len((trapped / "out.jsonl").read_text().splitlines()) == 3


def test_the_demo_ignores_modules_of_the_folder(run: Run, installed_bin: Path, trapped: Path) -> None:
    done = run(installed_bin / "ktqueue", "demo", cwd=trapped)
    assert done.returncode == 0, done.stderr
    assert "34 done, 0 failed" in done.stdout
