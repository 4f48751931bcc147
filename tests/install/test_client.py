"""A client without extras can send, read and list jobs and run batches, with a real server."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ktqueue import __version__
from ktqueue.broker.redis.private_server import running_url

pytestmark = pytest.mark.installed

Run = Callable[..., subprocess.CompletedProcess[str]]
PYTHON_API = """
import sys
from ktqueue import SyncClient
with SyncClient(sys.argv[1]) as client:
    job = client.submit(model="demo", prompt="Once upon a time", max_tokens=4, seed=7)
    print(client.result(job.id).usage.completion_tokens)
"""


def test_a_client_has_no_kernels_no_model_and_no_torch(run: Run, client_bin: Path, tmp_path: Path) -> None:
    names = ("torch", "numpy", "ktqueue_kernels", "starlette")
    code = f"from importlib.util import find_spec; print([name for name in {names} if find_spec(name)])"
    assert run(client_bin / "python", "-c", code, cwd=tmp_path).stdout.strip() == "[]"
    packages = next(client_bin.parent.glob("lib/python*/site-packages"))
    assert [path.name for path in packages.glob("ktqueue*")] != []
    assert [path for path in packages.glob("ktqueue*/**/*") if path.suffix in (".so", ".gguf")] == []


def test_a_client_can_send_and_read_a_job(run: Run, client_bin: Path, state_dir: Path, tmp_path: Path) -> None:
    flags = ("--state-dir", state_dir)
    assert run(client_bin / "ktqueue", "--version", cwd=tmp_path).stdout.split()[-1] == __version__
    sent = run(client_bin / "ktqueue", "submit", "Once upon a time", "--max-tokens", 4, *flags, cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    listed = run(client_bin / "ktqueue", "jobs", "list", "--json", *flags, cwd=tmp_path)
    assert "done" in {job["state"] for job in json.loads(listed.stdout)}


def test_a_client_can_run_a_batch(run: Run, client_bin: Path, state_dir: Path, tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4}
    line = {"custom_id": "c0", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    words = ("batch", "run", "in.jsonl", "-o", "out.jsonl", "--state-dir", state_dir)
    done = run(client_bin / "ktqueue", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text())["custom_id"] == "c0"


def test_the_python_api_works_without_extras(run: Run, client_bin: Path, state_dir: Path, tmp_path: Path) -> None:
    done = run(client_bin / "python", "-c", PYTHON_API, running_url(state_dir), cwd=tmp_path)
    assert done.stdout.strip() == "4", done.stderr


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        ("worker", "worker"),
        ("chat --local", "worker"),
        ("inspect demo", "worker"),
        ("gateway", "gateway"),
        ("bridge", "arq"),
        ("up", "gateway,worker,arq"),
        ("up --bridge", "gateway,worker,arq"),
        ("demo", "gateway,worker"),
    ],
)
def test_commands_that_need_an_extra_name_it_and_start_nothing(
    run: Run, client_bin: Path, tmp_path: Path, words: str, extras: str
) -> None:
    done = run(client_bin / "ktqueue", *words.split(), cwd=tmp_path)
    assert done.returncode == 1
    assert f"pip install 'ktqueue[{extras}]'" in done.stderr
    assert (f"pip install ./csrc '.[{extras}]'" in done.stderr) == ("worker" in extras)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []
