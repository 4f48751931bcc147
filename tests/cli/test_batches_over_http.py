"""`ktqueue batch submit` and its companions against a real gateway, a control worker and the demo model."""

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import OpenTerminal, Run, Stack

URL = "/v1/completions"


def write(path: Path, count: int, *, url: str = URL, **body: Any) -> Path:
    """Write `count` batch lines."""
    lines = (
        {"custom_id": f"c{number}", "method": "POST", "url": url, "body": {"model": "demo", "prompt": "Once", **body}}
        for number in range(count)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_batch_is_submitted_followed_listed_and_fetched(ktqueue: Run, stack: Stack, tmp_path: Path) -> None:
    name = os.fsdecode(b"in\xff.jsonl")  # not UTF-8
    source, server = write(tmp_path / name, 5, max_tokens=4, seed=1), ("--base-url", stack.url)
    with source.open("a") as file:
        bad = {"model": "demo", "prompt": "x", "temperature": 9}
        file.write(json.dumps({"custom_id": "bad", "method": "POST", "url": URL, "body": bad}) + "\n")
    done = ktqueue("batch", "submit", source, "--metadata", "night=3", "--follow", *server)
    assert done.returncode == 1, done.stderr  # a line failed
    batch_id, *shown = done.stdout.splitlines()
    assert "6 of 6, 1 failed" in "\n".join(shown) and f"fetch {batch_id} -o OUT.jsonl" in done.stderr
    batch = json.loads(ktqueue("batch", "status", batch_id, "--json", *server).stdout)
    assert batch["status"] == "completed" and batch["metadata"] == {"night": "3"}
    assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
    listed = json.loads(ktqueue("batch", "list", "--limit", "1", "--json", *server).stdout)
    assert listed == [batch] and batch_id in ktqueue("batch", "list", *server).stdout
    fetched = ktqueue("batch", "fetch", batch_id, "-o", "out.jsonl", *server)
    assert fetched.returncode == 0, fetched.stderr
    answers = records(tmp_path / "out.jsonl")
    assert [record["custom_id"] for record in answers] == [f"c{number}" for number in range(5)]
    for record in answers:
        assert record.keys() == {"id", "custom_id", "response", "error"} and record["error"] is None
        assert record["response"]["status_code"] == 200 and record["response"]["request_id"]
        assert record["response"]["body"]["object"] == "text_completion"
    (failure,) = records(tmp_path / "out.errors.jsonl")
    assert failure["custom_id"] == "bad" and "temperature" in json.dumps(failure)
    again = ktqueue("batch", "fetch", batch_id, "-o", "out.jsonl", *server)
    assert again.returncode == 2 and "exists already" in again.stderr
    assert ktqueue("batch", "fetch", batch_id, "-o", "out.jsonl", "--overwrite", *server).returncode == 0
    assert records(tmp_path / "out.jsonl") == answers
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "out.errors.jsonl", "out.jsonl"]
    cancelled = ktqueue("batch", "cancel", batch_id, *server)
    assert cancelled.returncode == 1 and "completed" in cancelled.stderr


@pytest.mark.parametrize(("name", "text"), [(".", "is not a regular file"), ("in.jsonl", "no such file")])
def test_a_missing_input_and_one_that_cannot_be_read_twice_differ(
    name: str, text: str, ktqueue: Run, tmp_path: Path
) -> None:
    done = ktqueue("batch", "submit", tmp_path / name)
    assert (done.returncode, done.stderr) == (2, f"ktqueue: {tmp_path / name}: {text}\n")


@pytest.mark.parametrize(
    ("change", "words", "text"),
    [
        (
            {"url": "/v1/chat/completions"},
            (),
            "in.jsonl:2: url must be /v1/completions, got '/v1/chat/completions'; a batch over HTTP has one url",
        ),
        ({"url": "/v1/embeddings"}, ("--endpoint", "/v1/embeddings"), "in.jsonl:1: url must be /v1/embeddings"),
        ({"model": "other"}, (), "in.jsonl:2: all lines of a batch need the same model: the first has 'demo'"),
        ({"model": None}, (), "in.jsonl:2: body.model is missing"),
        ({}, ("--metadata", "night"), "--metadata must be KEY=VALUE with at most 64 and 512 characters, got 'night'"),
        ({}, ("--base-url", "http://127.0.0.1:9"), "127.0.0.1:9"),
    ],
)
def test_mistakes_are_shown_before_anything_is_sent(
    change: dict[str, Any], words: tuple[str, ...], text: str, ktqueue: Run, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", 1)
    second = write(tmp_path / "second.jsonl", 1, **change).read_text().replace("c0", "c1")
    source.write_text(source.read_text() + second)
    nobody = () if "--base-url" in words else ("--base-url", "http://127.0.0.1:9")
    done = ktqueue("batch", "submit", source, *words, *nobody)
    assert text in done.stderr and done.returncode == (2 if nobody else 3)


def test_a_refused_batch_leaves_no_file(ktqueue: Run, stack: Stack, tmp_path: Path) -> None:
    import httpx

    before = httpx.get(f"{stack.url}/v1/files").json()["data"]
    done = ktqueue("batch", "submit", write(tmp_path / "in.jsonl", 1), "--window", "soon", "--base-url", stack.url)
    assert done.returncode == 2 and "completion_window" in done.stderr
    assert httpx.get(f"{stack.url}/v1/files").json()["data"] == before


@pytest.mark.parametrize("words", [("status", "nobody"), ("cancel", "nobody"), ("fetch", "nobody", "-o", "out.jsonl")])
def test_an_unknown_batch_ends_with_the_code_of_an_unknown_job(
    words: tuple[str, ...], ktqueue: Run, stack: Stack
) -> None:
    done = ktqueue("batch", *words, "--base-url", stack.url)
    assert (done.returncode, "no batch 'nobody'" in done.stderr) == (1, True), done.stderr
    assert ktqueue("jobs", "show", "nobody", *stack.flags).returncode == 1


@pytest.mark.long
def test_an_interrupted_follow_leaves_the_batch_running_until_it_is_cancelled(
    ktqueue: Run, stack: Stack, terminal: OpenTerminal, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", 3, max_tokens=100_000, ignore_eos=True)
    server = ("--base-url", stack.url)
    watched = terminal("batch", "submit", source, "--follow", *server)
    watched.wait_for("0/3")
    watched.type("\x03")
    watched.wait_for("keeps running")
    assert watched.end() == 130
    (batch,) = json.loads(ktqueue("batch", "list", "--limit", "1", "--json", *server).stdout)
    assert batch["status"] == "in_progress"
    early = ktqueue("batch", "fetch", batch["id"], "-o", "out.jsonl", *server)
    assert early.returncode == 1 and "is in_progress and has no output yet" in early.stderr
    assert ktqueue("batch", "cancel", batch["id"], *server).stdout == f"{batch['id']} cancelling\n"
    began = time.monotonic()
    followed = ktqueue("batch", "follow", batch["id"], *server)
    assert followed.returncode == 1 and "cancelled" in followed.stdout and time.monotonic() - began < 30


BATCH = {"id": "batch_1", "object": "batch", "status": "completed", "output_file_id": "file-1"}
Answer = tuple[int, dict[str, str], bytes]  # status, headers, body
BUSY: Answer = (503, {"retry-after": "0"}, b'{"error": {"message": "no"}}')


@pytest.fixture
def troubled() -> Iterator[str]:
    """The URL of a server without error files and counts. A batch is there at first, then twice not, then again. It
    closes the connection in the middle of a file."""
    answers: Iterator[Answer] = iter(
        [(200, {}, json.dumps(BATCH | {"status": "in_progress"}).encode()), BUSY, (429, *BUSY[1:])]
    )
    whole: Answer = (200, {}, json.dumps(BATCH).encode())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            cut = self.path.endswith("/content")
            answer: Answer = (200, {}, b"{}\n") if cut else next(answers, whole)
            status, headers, body = answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body) + cut))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_that_fails_for_a_while_does_not_end_a_follow(ktqueue: Run, troubled: str) -> None:
    done = ktqueue("batch", "follow", "batch_1", "--base-url", troubled)
    assert done.returncode == 0 and "completed" in done.stdout, done.stderr


def test_half_of_a_file_is_not_kept(ktqueue: Run, troubled: str, tmp_path: Path) -> None:
    done = ktqueue("batch", "fetch", "batch_1", "-o", "out.jsonl", "--base-url", troubled)
    assert done.returncode == 3 and "peer closed connection" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--base-url", "nonsense"), 2, "--base-url must be a URL such as http://"),
        (("--base-url", "ftp://127.0.0.1"), 2, "--base-url must be a URL such as http://"),
        (("--base-url", "http://"), 2, "--base-url must be a URL such as http://"),
        (("--base-url", "http://127.0.0.1:1"), 3, "http://127.0.0.1:1 cannot be reached: "),
        (("--api-key", "schl\u00fcssel"), 2, "--api-key must be made of printable ASCII characters"),
        (("--api-key", "se\ncret"), 2, "--api-key must be made of printable ASCII characters"),
    ],
)
def test_a_server_that_cannot_be_asked_is_named_in_plain_words(
    ktqueue: Run, flags: tuple[str, ...], code: int, words: str
) -> None:
    done = ktqueue("batch", "list", *flags)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert len(done.stderr.splitlines()) == 1 and "cret" not in done.stderr


@pytest.fixture
def locked() -> Iterator[str]:
    """The URL of a server that wants the key `right`, and leads all other paths to another URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_right = self.headers["authorization"] == "Bearer right"
            body = json.dumps(BATCH if is_right else {"error": {"message": "no API key"}}).encode()
            self.send_response((200 if is_right else 401) if self.path == "/v1/batches/batch_1" else 307)
            self.send_header("location", "https://example.com/")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_key_may_be_in_the_environment(ktqueue: Run, locked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ktqueue("batch", "status", "batch_1", "--base-url", locked)
    assert (
        refused.returncode == 1 and "no API key; the key is --api-key, or the variable OPENAI_API_KEY" in refused.stderr
    )
    led = ktqueue("batch", "list", "--base-url", locked, "--api-key", "right")
    assert led.returncode == 2 and "leads to https://example.com/: change --base-url" in led.stderr
    assert "ID must not be empty" in ktqueue("batch", "status", "", "--base-url", locked).stderr
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    assert ktqueue("batch", "status", "batch_1", "--base-url", locked).returncode == 0
    assert ktqueue("batch", "status", "batch_1", "--base-url", locked, "--api-key", "wrong").returncode == 1
