"""`ktqueue bench serve` against our gateway with the demo model, and against a server that misbehaves on purpose."""

import json
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from command_line import OpenTerminal, Stack

from ktqueue.cli.main import run

SMALL = ("--num-prompts", 12, "--random-input-len", 40, "--random-output-len", 16, "--ignore-eos")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
PAUSE_SECONDS = 0.05


def bench(*words: object) -> int:
    """Run the command in this process. Returns its exit code."""
    return run(["bench", "serve", *map(str, words)])


def test_our_gateway_is_measured(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    limits = ("--goodput", "ttft:60000 e2el:60000", "--goodput", "tpot:60000")
    assert bench("--url", stack.url, *SMALL, "--max-concurrency", 4, *limits, "--save-result", first) == 0
    found = json.loads(first.read_text())
    assert (found["completed"], found["failed"], found["model_id"]) == (12, 0, "demo")
    assert found["max_concurrent_requests"] == 4
    assert found["total_output_tokens"] == 12 * 16
    assert found["total_input_tokens"] == pytest.approx(12 * 40, rel=0.15)
    assert found["requests_without_usage"] == 0
    assert found["request_goodput"] == found["request_throughput"] == pytest.approx(12 / found["duration"])
    assert 0 < found["p90_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"] <= 1000 * found["duration"]
    shown = capsys.readouterr().out
    for word in ("TTFT", "TPOT", "ITL", "E2EL", "p95", "output tok/s", "goodput", "12 of 12 requests completed"):
        assert word in shown
    chat = ("--backend", "openai-chat", "--tokenizer", "demo", "--request-rate", 200, "--class", "batch")
    assert bench("--url", f"{stack.url}/v1", *SMALL, *chat, "--compare", first, "--json", second) == 0
    found = json.loads(second.read_text())
    assert found["total_input_tokens"] == pytest.approx(12 * 40, abs=12)  # a word may have two tokens
    assert found["extra_body"] == {"job_class": "batch"}
    assert found["duration"] >= 12 / 200
    shown = capsys.readouterr().out
    assert f"before: {first}" in shown
    assert "p95 TTFT ms" in shown
    assert "the loads differ: request_rate 200.0 (before inf)" in shown
    assert bench("--url", stack.url, "--model", "other", *SMALL) == 2
    assert "HTTP 404: no worker serves the model 'other'" in capsys.readouterr().err


def test_an_interrupted_run_shows_what_it_has(stack: Stack, terminal: OpenTerminal, tmp_path: Path) -> None:
    load = ("--num-prompts", 500, "--request-rate", 10, "--json", "found.json")
    process = terminal("bench", "serve", "--url", stack.url, "--random-output-len", 8, *load)
    process.wait_for("5/500")
    process.interrupt("requests completed")
    assert process.end() == 130
    found = json.loads((tmp_path / "found.json").read_text())
    assert 5 <= found["completed"] < 500
    assert found["median_ttft_ms"] > 0


@dataclass
class Misbehaving:
    """A server that answers each streamed request with the next of `answers`: bytes, or seconds of silence."""

    url: str
    answers: list[list[bytes | float]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def misbehaving() -> Iterator[Misbehaving]:
    """A server on a free port."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                head = line.decode()
                while (line := self.rfile.readline()) != b"\r\n":
                    head += line.decode()
                size = int(head.lower().partition("content-length: ")[2].partition("\r")[0])
                body = json.loads(self.rfile.read(size))
                if body["stream"]:
                    site.heads.append(head)
                    site.bodies.append(body)
                    answer = site.answers.pop(0)
                else:
                    reply = json.dumps({"usage": {"prompt_tokens": 5 + len(body["prompt"].split())}}).encode()
                    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(reply), reply]
                for part in answer:
                    if isinstance(part, bytes):
                        self.wfile.write(part)
                    else:
                        time.sleep(part)
                if not answer or answer[-1] == b"":
                    return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        site = Misbehaving(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield site
        server.shutdown()


def chunk(text: str) -> bytes:
    """A piece of a body in chunks."""
    return b"%x\r\n%b\r\n" % (len(text.encode()), text.encode())


def event(**fields: Any) -> bytes:
    """An event of a completion."""
    return chunk(f"data: {json.dumps(fields)}\n\n")


def token(text: str, finish_reason: str | None = None) -> bytes:
    """An event with text."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}])


DONE = chunk("data: [DONE]\n\n")
GOOD: list[bytes | float] = [
    STREAM_HEAD, PAUSE_SECONDS, token("a"), PAUSE_SECONDS, token("b"), token("", "length"),
    event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3}), DONE, LAST_CHUNK,
]  # fmt: skip
UNCOUNTED: list[bytes | float] = [STREAM_HEAD, token("a"), token("b", "stop"), LAST_CHUNK]
REFUSED = b'{"error": {"message": "slow \\u001b[2Jdown"}}'
# More than headers may have, in one piece with them, is no fault.
GOOD_AT_ONCE: list[bytes | float] = [
    STREAM_HEAD + token("a" * 100_000) + b"".join([token("b", "stop"), DONE, LAST_CHUNK])
]
FAILURES: dict[str, list[bytes | float]] = {
    "HTTP 429": [b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(REFUSED), REFUSED],
    "error in stream": [STREAM_HEAD, token("a"), event(error={"message": "out of pages"}), DONE, LAST_CHUNK],
    "incomplete stream": [STREAM_HEAD, token("a"), LAST_CHUNK],
    "no output": [STREAM_HEAD, token("", "stop"), DONE, LAST_CHUNK],
    "invalid event": [STREAM_HEAD, chunk("data: {]\n\n"), DONE, LAST_CHUNK],
    "not HTTP": [b"SSH-2.0-x\r\n\r\n", b""],
    "disconnected": [STREAM_HEAD, token("a"), b""],
    "too long": [b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 20_000, b""],
    "timeout": [STREAM_HEAD, token("a"), 2.0],
}


def test_answers_are_timed_and_failures_are_counted_by_kind(
    misbehaving: Misbehaving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    misbehaving.answers = [GOOD, GOOD, UNCOUNTED, [], GOOD, GOOD_AT_ONCE, *FAILURES.values(), FAILURES["HTTP 429"]]
    target = tmp_path / "found.json"
    flags = ("--model", "m", "--max-concurrency", 1, "--num-prompts", len(FAILURES) + 5, "--timeout", 1)
    extra = ("--extra-body", '{"stream_options": null, "top_k": 1}', "--priority", -2, "--temperature", 0)
    keys = ("--api-key", "secret", "--header", "X-Tenant=a b")
    assert bench("--url", misbehaving.url, *flags, *extra, *keys, "--json", target) == 0
    found = json.loads(target.read_text())
    assert {kind: failure["count"] for kind, failure in found["failures"].items()} == {
        **dict.fromkeys(FAILURES, 1), "HTTP 429": 2
    }  # fmt: skip
    # The first answer was a warm-up. A kept connection that the server closes before it answers is no failure.
    assert found["completed"] == 4
    assert found["requests_without_usage"] == 2
    assert found["total_output_tokens"] == 2 * 3 + 2 * 2  # the others had two chunks
    assert found["mean_e2el_ms"] >= 2 / 4 * 1000 * 2 * PAUSE_SECONDS
    assert found["p90_ttft_ms"] >= 1000 * PAUSE_SECONDS
    assert found["p90_itl_ms"] >= 1000 * PAUSE_SECONDS * 0.9
    assert "secret" not in target.read_text()
    shown = capsys.readouterr().out
    assert "4 of 14 requests completed" in shown
    assert "failed 2 x HTTP 429: slow [2Jdown" in shown
    assert "2 answers had no usage" in shown
    assert "Authorization: Bearer secret\r\nX-Tenant: a b\r\n" in misbehaving.heads[0]
    body = misbehaving.bodies[0]
    prompt = body.pop("prompt")
    assert len(prompt.split()) == 256 - 5
    assert body == {
        "model": "m", "stream": True, "max_tokens": 128, "top_k": 1, "priority": -2, "temperature": 0,
    }  # fmt: skip


def test_a_run_without_any_answer_fails(misbehaving: Misbehaving, capsys: pytest.CaptureFixture[str]) -> None:
    misbehaving.answers = [FAILURES["HTTP 429"]] * 2
    flags = ("--url", misbehaving.url, "--model", "m", "--num-prompts", 2)
    assert bench(*flags, "--num-warmups", 0) == 1
    assert "0 of 2 requests completed" in capsys.readouterr().out
    misbehaving.answers = [FAILURES["HTTP 429"]]
    assert bench(*flags) == 2
    assert "HTTP 429: slow [2Jdown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--url", "http://127.0.0.1:1"], "cannot connect"),
        (["--url", "ftp://a"], "--url: must be a URL such as http://127.0.0.1:8000, got 'ftp://a'"),
        (["--backend", "grpc"], "--backend: must be openai or openai-chat, got 'grpc'"),
        (["--request-rate", "0"], "--request-rate: must be greater than 0, got 0"),
        (["--goodput", "itl:5"], "--goodput: must be ttft, tpot or e2el, got 'itl'"),
        (["--goodput", "ttft:x"], "--goodput ttft: must be a number above 0"),
        (["--metric-percentiles", "101"], "--metric-percentiles: must be a number above 0, at most 100, got '101'"),
        (["--percentile-metrics", "speed"], "--percentile-metrics: must be ttft, tpot, itl, e2el or"),
        (["--header", "x"], "--header: must be KEY=VALUE, got 'x'"),
        (["--header", "a b=c"], "--header: not a header: 'a b'"),
        (["--extra-body", "[]"], "--extra-body: must be a JSON object"),
        (["--dataset-name", "custom"], "--dataset-path names the file"),
        (["--trace", "t.csv", "--request-rate", "1"], "--trace has the arrivals"),
        (["--compare", "/dev/null"], "--compare: /dev/null"),
    ],
)
def test_an_error_names_the_flag(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*flags) in (2, 3)
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.out == ""
