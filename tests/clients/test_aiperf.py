"""aiperf, unchanged, measures a server: every request succeeds, and its token counts are those of the server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiperf")

pytestmark = pytest.mark.clients
REQUESTS, TOKENS = 8, 16


def test_every_request_succeeds(server: Any, tokenizer_folder: Path, tmp_path: Path) -> None:
    # Offline, aiperf looks for tokenizers in the cache only. A folder is read without the network all the same.
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_HOME")}
    environment["HF_HOME"] = str(tmp_path / "home")
    done = subprocess.run(
        [Path(sys.executable).with_name("aiperf"), "profile", "--model", server.model, "--url", server.root,
         "--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer_folder, "--ui", "none",
         "--request-count", str(REQUESTS), "--concurrency", "2", "--synthetic-input-tokens-mean", "32",
         "--output-tokens-mean", str(TOKENS), "--extra-inputs", "ignore_eos:true"],
        env=environment,
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    assert report["is_complete"] and report["error_summary"] == []
    assert report["completed_request_count"]["avg"] == REQUESTS
    assert report["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS
    assert report["time_to_first_token"]["min"] > 0
