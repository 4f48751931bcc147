"""guidellm, unchanged, measures a server: every request succeeds and has the tokens that were asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("guidellm")

pytestmark = pytest.mark.clients
REQUESTS, TOKENS = 8, 16


def test_every_request_succeeds(server: Any, tokenizer_folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [Path(sys.executable).with_name("guidellm"), "run", "--disable-console",
         "--backend", f"kind=openai_http,target={server.root},model={server.model}",
         "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
         "--tokenizer", f"kind=hf_auto,model={tokenizer_folder}",
         "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}",
         "--output", f"kind=json,path={report}"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"] and not requests["incomplete"]
    assert [request["output_tokens"] for request in requests["successful"]] == [TOKENS] * REQUESTS
    assert all(request["time_to_first_token_ms"] > 0 for request in requests["successful"])
