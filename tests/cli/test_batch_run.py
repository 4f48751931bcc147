"""`ktqueue batch run` with real workers: complete, failing, interrupted, killed and continued."""

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import Run, Stack, Start


def _write(path: Path, count: int, *, tokens: int = 24, **body: object) -> Path:
    with path.open("w") as file:
        for number in range(count):
            question: dict[str, object]
            if number % 4:
                url = "/v1/chat/completions"
                question = {"messages": [{"role": "user", "content": f"Tell me a story about number {number}."}]}
            else:
                url, question = "/v1/completions", {"prompt": ["Once upon a time", "There was a king"]}
            whole = {"model": "demo", "max_tokens": tokens, **question, **body}
            file.write(json.dumps({"custom_id": f"c{number}", "method": "POST", "url": url, "body": whole}) + "\n")
    return path


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _jobs(ktqueue: Run, stack: Stack, run: str) -> list[str]:
    listed = json.loads(ktqueue("jobs", "list", "--limit", "1000", "--json", *stack.flags).stdout)
    return [job["id"] for job in listed if job["id"].startswith(f"batch-{run}")]


def test_answers_are_openai_batch_output_lines(ktqueue: Run, stack: Stack, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", 8, seed=1)
    done = ktqueue("batch", "run", source, "-o", "out.jsonl", "--json", *stack.flags)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["total"], summary["answered"], summary["failed"], summary["interrupted"]) == (8, 8, 0, False)
    records = {record["custom_id"]: record for record in _records(tmp_path / "out.jsonl")}
    assert records.keys() == {f"c{number}" for number in range(8)}
    chat, completion = records["c1"], records["c0"]
    assert chat["error"] is None
    assert chat["id"].startswith("batch_req_")
    assert chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens"] == 24
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] == "length"
    assert [choice["index"] for choice in completion["response"]["body"]["choices"]] == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_batch_answers_as_http_does(ktqueue: Run, stack: Stack, tmp_path: Path) -> None:
    import httpx

    source = _write(tmp_path / "in.jsonl", 4, seed=5, temperature=0.8, logprobs=None)
    assert ktqueue("batch", "run", source, "-o", "out.jsonl", *stack.flags).returncode == 0
    for record in _records(tmp_path / "out.jsonl"):
        line = _records(source)[int(record["custom_id"][1:])]
        answer = httpx.post(stack.url + line["url"], json=line["body"], timeout=60).json()
        ours = record["response"]["body"]
        assert ours.keys() == answer.keys()
        assert ours["choices"] == answer["choices"]


def test_failed_lines_go_to_an_error_file_and_can_be_tried_again(ktqueue: Run, stack: Stack, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", 3, tokens=4)
    bad = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": 9, "max_tokens": 4}
    late = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "expires_in": 0.05}
    late["ignore_eos"] = True  # otherwise it might end before the deadline
    with source.open("a") as file:
        for name, body in (("bad", bad), ("late", late)):
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    done = ktqueue("batch", "run", source, "-o", "out.jsonl", *stack.flags)
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert "\033" not in done.stdout + done.stderr
    failures = {record["custom_id"]: record for record in _records(tmp_path / "out.errors.jsonl")}
    assert failures["bad"]["response"]["status_code"] == 400
    assert failures["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert failures["late"]["response"] is None
    assert failures["late"]["error"]["code"] == "batch_expired"
    again = ktqueue("batch", "run", source, "-o", "out.jsonl", "--json", *stack.flags)
    assert (again.returncode, json.loads(again.stdout)["skipped"]) == (1, 5)
    mended = source.read_text().replace('"temperature": 9', '"temperature": 1').replace('"expires_in": 0.05', '"n": 1')
    source.write_text(mended.replace('"max_tokens": 4000', '"max_tokens": 4'))
    third = ktqueue("batch", "run", source, "-o", "out.jsonl", "--retry-failed", *stack.flags)
    assert third.returncode == 0, third.stderr
    assert len(_records(tmp_path / "out.jsonl")) == 5
    assert not (tmp_path / "out.errors.jsonl").exists()


@pytest.mark.long
def test_a_batch_that_is_killed_at_random_answers_each_line_once(
    ktqueue: Run, start: Start, stack: Stack, tmp_path: Path
) -> None:
    chance = random.Random()
    source = _write(tmp_path / "in.jsonl", 80, tokens=32)
    output, name = tmp_path / "out.jsonl", tmp_path / "out.jsonl.run"
    run = None
    for _ in range(3):
        process = start("batch", "run", source, "-o", output, "--max-concurrency", 12, *stack.flags, cwd=tmp_path)
        before = output.stat().st_size if output.exists() else 0
        while process.poll() is None and (not output.exists() or output.stat().st_size == before):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.communicate()
        if name.exists():
            run = json.loads(name.read_text())["run"]
        with output.open("ab") as file:  # as after a loss of power
            file.write(b'{"id":"batch_req_torn')
    done = ktqueue("batch", "run", source, "-o", output, *stack.flags)
    assert done.returncode == 0, done.stderr
    counts = Counter(record["custom_id"] for record in _records(output))
    assert counts == {f"c{number}": 1 for number in range(80)}
    assert run is not None
    assert len(_jobs(ktqueue, stack, run)) == 100  # 20 lines have two prompts: no job was computed twice
    assert not name.exists()


def test_ctrl_c_waits_for_the_running_lines(ktqueue: Run, start: Start, stack: Stack, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", 24, tokens=40)
    output = tmp_path / "out.jsonl"
    process = start("batch", "run", source, "-o", output, "--max-concurrency", 4, *stack.flags, cwd=tmp_path)
    while not output.exists() or not output.stat().st_size:
        time.sleep(0.01)
        assert process.poll() is None
    run = json.loads((tmp_path / "out.jsonl.run").read_text())["run"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "running lines" in err
    assert "continues from here" in out
    answered = len(_records(output))
    assert 0 < answered < 24
    states = json.loads(ktqueue("jobs", "list", "--limit", "1000", "--json", *stack.flags).stdout)
    assert {job["state"] for job in states if job["id"].startswith(f"batch-{run}")} == {"done"}
    assert ktqueue("batch", "run", source, "-o", output, *stack.flags).returncode == 0
    assert len({record["custom_id"] for record in _records(output)}) == len(_records(output)) == 24


def test_jobs_of_another_class_are_found_again(ktqueue: Run, start: Start, stack: Stack, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", 24, tokens=40)
    output = tmp_path / "out.jsonl"
    process = start("batch", "run", source, "-o", output, "--max-concurrency", 4, *stack.flags, cwd=tmp_path)
    while not output.exists() or not output.stat().st_size:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    run = json.loads((tmp_path / "out.jsonl.run").read_text())["run"]
    with output.open("wb"):
        pass  # as if no answer had been written: all are found in Redis
    done = ktqueue("batch", "run", source, "-o", output, "--class", "interactive", *stack.flags)
    assert done.returncode == 0, done.stderr
    assert len(_records(output)) == 24
    assert len(_jobs(ktqueue, stack, run)) == 30


def test_the_input_is_refused_as_output(ktqueue: Run, stack: Stack, tmp_path: Path) -> None:
    source = _write(tmp_path / "out.errors.jsonl", 2, tokens=4)
    text = source.read_text()
    done = ktqueue("batch", "run", source, "-o", "out.jsonl", "--overwrite", *stack.flags)
    assert done.returncode == 2
    assert "out.errors.jsonl: the output would overwrite the input" in done.stderr
    assert source.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["out.errors.jsonl"]


@pytest.mark.long
def test_a_second_ctrl_c_ends_the_batch_at_once(ktqueue: Run, start: Start, stack: Stack, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", 8, tokens=1500, ignore_eos=True)
    process = start("batch", "run", source, "-o", "out.jsonl", *stack.flags, cwd=tmp_path)
    while not json.loads(ktqueue("jobs", "list", "--state", "running", "--json", *stack.flags).stdout):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    running = json.loads(ktqueue("jobs", "list", "--json", *stack.flags).stdout)
    ids = [job["id"] for job in running if job["state"] in ("running", "queued")]
    assert ids
    assert ktqueue("jobs", "cancel", *ids, *stack.flags).returncode == 0


def test_a_model_without_a_worker_is_an_error_before_any_line_runs(ktqueue: Run, stack: Stack, tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", 2, tokens=4, model="gpt-9")
    done = ktqueue("batch", "run", source, "-o", "out.jsonl", *stack.flags)
    assert done.returncode == 1
    assert "in.jsonl:1: model 'gpt-9' is not served; served: demo" in done.stderr
    done = ktqueue("batch", "run", source, "-o", "out.jsonl", "--model", "demo", *stack.flags)
    assert done.returncode == 0, done.stderr


def test_an_output_of_another_input_is_not_changed(ktqueue: Run, stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"custom_id":"stranger"}\n')
    source = _write(tmp_path / "in.jsonl", 1, tokens=4)
    done = ktqueue("batch", "run", source, "-o", "out.jsonl", *stack.flags)
    assert done.returncode == 2
    assert "'stranger'" in done.stderr
    assert (tmp_path / "out.jsonl").read_text() == '{"custom_id":"stranger"}\n'
    assert ktqueue("batch", "run", source, "-o", "out.jsonl", "--overwrite", *stack.flags).returncode == 0
    assert [record["custom_id"] for record in _records(tmp_path / "out.jsonl")] == ["c0"]


def test_plain_lines_from_standard_input_with_some_that_are_invalid(ktqueue: Run, stack: Stack, tmp_path: Path) -> None:
    words = ("batch", "run", "-", "-o", "out.jsonl", *stack.flags)
    lines = '{"prompt": "Once upon a time", "max_tokens": 4}\n{"prompt": \n{"prompt": "A", "temperature": 9}\n'
    refused = ktqueue(*words, stdin=lines)
    assert refused.returncode == 2
    assert "out.jsonl.in:2: not JSON" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    done = ktqueue(*words, "--skip-invalid", stdin=lines)
    assert (done.returncode, "2 failed" in done.stdout) == (1, True), done.stderr
    (answer,) = _records(tmp_path / "out.jsonl")
    assert answer["custom_id"] == "line-1"
    assert answer["response"]["body"]["model"] == "demo"
    failures = {record["custom_id"]: record["response"] for record in _records(tmp_path / "out.errors.jsonl")}
    assert {name: response["status_code"] for name, response in failures.items()} == {"line-2": 400, "line-3": 400}
    assert "not JSON" in failures["line-2"]["body"]["error"]["message"]
    again = ktqueue(*words, stdin='{"prompt": "Something else"}\n')
    assert again.returncode == 2
    assert "answers of an earlier run" in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.errors.jsonl", "out.jsonl"]
