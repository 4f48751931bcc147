"""`ktqueue pull` and `ktqueue up --model hf:...` against a server that speaks the hub's protocol."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from command_line import Run, Start, UpWith
from local_hub import LocalHub, local_hub

from ktqueue.loading.model_path import resolve


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as server:
        server.add("Fox/Tale-GGUF", {"Tale-Q4_0.gguf": resolve("demo"), "Tale-Q8_0.gguf": b"GGUF"})
        yield server


@pytest.fixture
def environment(hub: LocalHub, tmp_path: Path) -> dict[str, str]:
    """The environment of a user with an empty cache."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}


@pytest.mark.long
def test_a_killed_download_continues_and_the_model_is_served(
    hub: LocalHub, environment: dict[str, str], start: Start, up_with: UpWith, tmp_path: Path
) -> None:
    hub.stop_after = 12 << 20
    pulling = start("pull", "Fox/Tale-GGUF:q4_0", cwd=tmp_path, env=environment)
    assert hub.stopped.wait(60)
    (part,) = wait_for_a_part(tmp_path)
    pulling.send_signal(signal.SIGKILL)
    pulling.communicate()
    begun = part.stat().st_size
    hub.stop_after = None
    hub.go_on.set()
    hub.requests.clear()
    with up_with("--model", "hf:Fox/Tale-GGUF:q4_0", env=environment) as stack:
        assert [asked for *_, asked in hub.requests if asked] == [f"bytes={begun}-"]
        (model,) = httpx.get(f"{stack.url}/v1/models").json()["data"]
        assert model["id"] == "Tale-GGUF:q4_0"
        body = {"model": model["id"], "prompt": "Once", "max_tokens": 4}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 4
    assert not part.exists()


@pytest.mark.long
def test_fit_downloads_no_model_that_is_too_large(hub: LocalHub, environment: dict[str, str], ktqueue: Run) -> None:
    words = ("fit", "hf:Fox/Tale-GGUF:q4_0", "--host-memory", "10MiB", "--gpu-memory", "0B")
    done = ktqueue(*words, env=environment)
    assert done.returncode == 1 and "its files are 18.7 MiB" in done.stdout, done.stderr
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


def wait_for_a_part(folder: Path) -> list[Path]:
    """Wait until a file is partly downloaded. Returns the incomplete files."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if parts := [path for path in folder.rglob("*.incomplete") if path.stat().st_size]:
            return parts
        time.sleep(0.01)
    raise AssertionError("nothing is downloaded")


def test_nothing_is_started_for_an_unknown_name(
    hub: LocalHub, environment: dict[str, str], ktqueue: Run, tmp_path: Path
) -> None:
    for words, says in (
        (["--model", "hf:Fox/Tale-GGUF:Q5_K_M"], "hf:Fox/Tale-GGUF:Q8_0  4 B"),
        (["--model", "Fox/Tale-GGUF"], "give hf:Fox/Tale-GGUF"),
        (["--device", "xpu"], "Intel GPUs are not supported yet"),
        (["--rules", "exakt"], "did you mean --rules exact?"),
    ):
        done = ktqueue("up", *words, env=environment)
        assert (done.returncode, done.stdout) == (2, "") and " ".join(says.split()) in done.stderr, done.stderr
    assert not (tmp_path / ".ktqueue").exists()
