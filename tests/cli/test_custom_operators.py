"""A worker process serves a model with operators of an installed package, and survives their errors."""

import os
from pathlib import Path

import httpx
import pytest
from command_line import Run, UpWith
from example_package import RULES, install_example

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_worker_serves_with_operators_of_a_package(tmp_path: Path, up_with: UpWith, ktqueue: Run) -> None:
    packages = install_example(tmp_path)
    flag = tmp_path / "broken"
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        RULES.replace("op: DoubleNorm", f"class: exact_operators:DoubleNorm\n    kwargs: {{fails_while: {flag}}}")
    )
    env = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(packages)))}
    shown = ktqueue("inspect", "--model", "demo", "--rules", rules, "--json", env=env)
    assert "exact_operators:TorchExperts" in shown.stdout and "exact_operators:DoubleNorm" in shown.stdout
    refused = ktqueue("inspect", "--model", "demo", "--rules", rules)
    assert refused.returncode and f"{rules}:9: exact_operators cannot be imported" in refused.stderr.replace("\n", "")
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    with up_with("--model", "demo", "--rules", str(rules), env=env) as stack, httpx.Client(timeout=60) as client:
        first = client.post(f"{stack.url}/v1/completions", json=body)
        assert first.status_code == 200 and first.json()["usage"]["completion_tokens"] == 16
        flag.touch()
        failed = client.post(f"{stack.url}/v1/completions", json=body)
        assert failed.status_code >= 500 and failed.json()["error"]["message"], failed.text
        flag.unlink()
        again = client.post(f"{stack.url}/v1/completions", json=body)
        assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
