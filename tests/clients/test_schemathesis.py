"""schemathesis, unchanged: requests made from our own /openapi.json are answered as it says, and none with a 5xx."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("schemathesis")

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

# A body may be refused for its size. A deleted job can still be read: it is cancelled.
SETTINGS = """
[checks]
negative_data_rejection.expected-statuses = [400, 401, 404, 405, 406, 409, 413, 415, 422, 429]
use_after_free.enabled = false
positive_data_acceptance.enabled = false
"""


def test_answers_are_as_described(brief_server: Any, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    done = subprocess.run(
        [Path(sys.executable).with_name("st"), "run", f"{brief_server.root}/openapi.json", "--seed", "1",
         "--phases", "coverage,fuzzing", "--max-examples", "10", "--continue-on-failure", "--request-timeout", "60",
         "--warnings", "off", "--no-color"],
        cwd=tmp_path, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout, done.stdout
