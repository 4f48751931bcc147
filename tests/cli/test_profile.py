"""`--profile` of the local commands, and `ktqueue profile` on what they wrote."""

import http.client
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Run, UpWith

from ktqueue.cli.main import run
from ktqueue.core.settings.profile import ProfileConfig
from ktqueue.profiling.folder import read_profile
from ktqueue.profiling.request_times import request_times
from ktqueue.profiling.writer import RecordWriter

TINY = ["bench", "engine", "--model", "synthetic:tiny:q4_k_m", "--prompt-tokens", "5", "--output-tokens", "4"]


def test_bench_engine_writes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "profile"
    assert run([*TINY, "--rows", "1,3", "--prefill", "20", "--rounds", "2", "--profile", str(folder)]) == 0
    (process,) = read_profile(folder)
    assert process.head["role"] == "bench"
    assert process.head["memory_bandwidth"] > 0
    assert {step["rows"] for step in process.steps} == {1, 3}
    layers = process.steps[0]["cpu_runs"]
    assert all(step["cpu_experts"] >= layers > 0 and step["cpu_bytes"] > 0 for step in process.steps)
    capsys.readouterr()
    assert run(["profile", str(folder)]) == 0
    shown = capsys.readouterr().out
    for words in ("bench", "rows", "prompts", "3-4", "launch", "share", "memory", "probe"):
        assert words in shown
    assert "seconds" in (folder / "profile.html").read_text()
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert json.loads((folder / "flame.speedscope.json").read_text())["profiles"]


def test_flags_choose_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, elsewhere = tmp_path / "profile", tmp_path / "new" / "elsewhere"
    assert run([*TINY, "--rows", "1", "--prefill", "0", "--rounds", "1", "--profile", str(folder)]) == 0
    capsys.readouterr()
    assert run(["profile", str(folder), "--no-table", "--no-page", "--no-flame", "--output", str(elsewhere)]) == 0
    assert capsys.readouterr().out == ""
    assert [path.name for path in elsewhere.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("command", [TINY, ["chat", "--local"]])
def test_a_wrong_folder_is_an_error_before_the_model_is_loaded(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run([*command, "--profile", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert "profile.folder" in error and "cannot be written: File exists" in error
    assert "loading" not in error


def test_a_missing_profile_is_an_error_of_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", str(tmp_path / "absent")]) == 2
    assert "absent is not a folder; --profile" in capsys.readouterr().err


@dataclass(frozen=True)
class Answer:
    """An answer of a gateway."""

    def lines(self, wall: float) -> bytes:
        times = '"at":2e9,"seconds":0.004,"first":0.002'
        return f'{{{times},"path":"/x","status":200,"request_id":"r","requests":["job"]}}\n'.encode()


def test_a_gateways_profile_is_shown_too_and_names_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = RecordWriter(ProfileConfig(folder=str(tmp_path)), {"role": "gateway", "model": "m[/b] [red]"})
    writer.put("requests", Answer())
    writer.close()
    assert run(["profile", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "m[/b] [red]" in shown
    assert "1 HTTP requests; median 4.00 ms" in shown


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = RecordWriter(ProfileConfig(folder=str(tmp_path / "profile")), {})
    writer.put("requests", Answer())
    writer.close()
    (tmp_path / "trace.json").symlink_to("/dev/full")
    assert run(["profile", str(tmp_path / "profile"), "--output", str(tmp_path)]) == 1
    assert f"{tmp_path / 'trace.json'}: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--profile", "folder"), ("--threads", "2"), ("--kv-cache-dtype", "fp8")])
def test_chat_takes_flags_of_an_engine_only_for_a_local_one(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", *flags]) == 2
    assert f"{flags[0]} needs --local" in capsys.readouterr().err


def ask(url: str, tokens: int) -> tuple[str, float]:
    """Stream a completion of so many tokens. Returns the job's id, and the seconds until the answer's end."""
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.connect()
    began = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.read().endswith(b"[DONE]\n\n")
    seconds = time.monotonic() - began
    connection.close()
    return answer.headers["x-job-id"], seconds


@pytest.mark.long
def test_parts_of_a_request_add_up_to_what_its_client_saw(tmp_path: Path, up_with: UpWith) -> None:
    folder, tokens = tmp_path / "profile", 400
    with up_with("--workers", "2", "--profile", str(folder)) as stack:
        ask(stack.url, 2)
        seen = dict(ask(stack.url, tokens) for _ in range(5))
    processes = read_profile(folder)
    assert sorted(process.head["role"] for process in processes) == ["gateway", "worker", "worker"]
    found = {times.id: times for times in request_times(processes) if times.tokens == tokens}
    assert found.keys() == seen.keys()
    for request, seconds in seen.items():
        times = found[request]
        assert times.seconds == pytest.approx(times.ended - times.began, rel=0.001)
        assert times.seconds <= seconds + 0.001
        assert all(times.parts[part] > 0 for part in ("inbound", "tokenise", "launch", "sample", "publish"))
    # Whatever else runs on the machine can only delay the client's end, so the quietest request shows the accounting.
    assert min(1 - found[request].seconds / seconds for request, seconds in seen.items()) < 0.03
    for request in seen:
        lines = [line for process in processes for line in process.tokens if line["request"] == request]
        assert [line["position"] for line in lines] == list(range(tokens))
        assert ["arrived" in line for line in lines] == [True] + [False] * (tokens - 1)


@pytest.mark.long
def test_a_local_chat_has_a_line_for_each_token(ktqueue: Run, tmp_path: Path) -> None:
    done = ktqueue("chat", "--local", "--max-tokens", 5, "--profile", "profile", stdin="Tell me a story.\n")
    assert done.returncode == 0
    (process,) = read_profile(tmp_path / "profile")
    (times,) = request_times([process])
    assert times.tokens == len(process.tokens) == 5
    assert times.seconds == pytest.approx(times.ended - times.began, rel=0.01)


@pytest.mark.long
def test_a_killed_worker_leaves_its_part_of_a_request(tmp_path: Path, up_with: UpWith) -> None:
    folder = tmp_path / "profile"
    with up_with("--workers", "2", "--profile", str(folder)) as stack, ThreadPoolExecutor(1) as client:
        asked = client.submit(ask, stack.url, 600)
        written: list[Path] = []
        while not written and not asked.done():
            time.sleep(0.01)
            written = [path for path in folder.glob("*.tokens.*") if path.read_bytes().count(b"\n") > 1]
        (running,) = written
        os.kill(int(running.name.partition(".")[0].rpartition("-")[2]), signal.SIGKILL)
        request, seconds = asked.result()
    processes = read_profile(folder)
    lines = [[line for line in process.tokens if line["request"] == request] for process in processes]
    # The worker that ran the request first may have started last.
    first, second = sorted((found for found in lines if found), key=lambda found: found[0]["position"])
    assert first[-1]["position"] < second[0]["position"]
    assert second[-1]["position"] == 599
    times = next(times for times in request_times(processes) if times.id == request)
    assert times.parts["takeover"] > 0
    assert times.seconds == pytest.approx(times.ended - times.began, rel=0.001)
    assert times.seconds <= seconds + 0.001
