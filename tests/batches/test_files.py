"""Input and output files of a batch: faults by line, incomplete last lines, one record for each custom_id."""

import io
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktqueue.batches.errors import BatchFault
from ktqueue.batches.id_set import IdSet
from ktqueue.batches.input import MAX_LINE_BYTES, BatchLine, LineFault, attempt_lines, read_lines, survey
from ktqueue.batches.line_jobs import request_id
from ktqueue.batches.output import BatchOutput, OutputPaths, RecordFile
from ktqueue.batches.spool import spool

GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "demo", "messages": []},
}


def _line(**changes: Any) -> str:
    """A valid batch line with changed fields."""
    return json.dumps({**GOOD, **changes})


@given(st.lists(st.text(max_size=3)))
def test_an_id_set_is_a_set(texts: list[str]) -> None:
    ids = IdSet()
    plain: set[str] = set()
    for text in texts:
        assert ids.add(text) == (text not in plain)
        plain.add(text)
        assert text in ids
    assert len(ids) == len(plain)


def test_an_id_set_takes_at_most_32_bytes_for_each_text() -> None:
    ids = IdSet()
    for number in range(50_000):
        assert ids.add(f"request-{number}")
    assert len(ids) == 50_000
    assert "request-50000" not in ids
    assert ids._slots.itemsize * len(ids._slots) <= 50_000 * 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"promt": "a"}', "must have custom_id, method, url and body, or be a body with prompt or messages"),
        (_line(custom_id=7), "custom_id must be a text"),
        (_line(custom_id=""), "custom_id must be a text"),
        (_line(custom_id="x" * 513), "custom_id must be a text"),
        (_line(method="GET"), "method must be POST, got 'GET'"),
        (_line(url="/v1/embeddings"), "url must be /v1/chat/completions or /v1/completions or /v1/responses"),
        (_line(body=None), "body must be an object"),
        (_line(body={"stream": True}), "body.stream must be false"),
    ],
)
def test_a_faulty_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(_line() + "\n\n" + text + "\n")
    with pytest.raises(BatchFault, match=r"in\.jsonl:3: ") as fault:
        survey(path, model=None)
    assert message in fault.value.message


def test_errors_name_broken_utf8_and_a_repeated_custom_id(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(_line().encode() + b"\n\xff\n" + _line().encode())
    with pytest.raises(BatchFault) as fault:
        survey(path, model=None)
    assert "in.jsonl:2: not UTF-8" in fault.value.message
    assert "in.jsonl:3: custom_id 'a' was used before" in fault.value.message


def test_at_most_ten_faults_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("{\n" * 1_000)
    with pytest.raises(BatchFault) as fault:
        survey(path, model=None)
    assert fault.value.message.count("not JSON") == 10


def test_a_line_that_is_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.truncate(40 << 20)
    with pytest.raises(LineFault, match="longer than 32 MiB"):
        next(read_lines(path))


def test_a_survey_counts_lines_and_models_without_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\ufeff" + _line() + "\r\n\r\n" + _line(custom_id="b", body={"model": "other"}))
    found = survey(path, model=None)
    assert (found.lines, found.models) == (2, {"demo": 1, "other": 3})
    assert survey(path, model="mine").models == {"mine": 1}
    assert [(line.number, line.custom_id) for line in read_lines(path)] == [(1, "a"), (3, "b")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b'{"custom_id":"a"}\n', b'{"custom_id":"a"}\n'),
        (b'{"custom_id":"a"}\n{"id":"batch_req_7", "cus', b'{"custom_id":"a"}\n'),
        (b'{"i', b""),
        (b'{"custom_id":"a"}\n{"custom_id":"b"}', b'{"custom_id":"a"}\n{"custom_id":"b"}\n'),
        (b'{"custom_id":"a"}\n{"id":"batch_req_' + b"x" * 200_000, b'{"custom_id":"a"}\n'),
    ],
)
def test_an_incomplete_last_line_is_cut_off(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(before)
    RecordFile(path).close()
    assert path.read_bytes() == after


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    first = BatchOutput(tmp_path / "out.jsonl")
    with pytest.raises(BatchFault, match="another batch run"):
        BatchOutput(tmp_path / "out.jsonl")
    first.close(finished=False)
    BatchOutput(tmp_path / "out.jsonl").close(finished=False)


def test_a_run_keeps_its_name_until_it_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    names: list[str] = []
    for finished in (False, True, False):
        output = BatchOutput(path)
        names.append(output.run)
        output.close(finished=finished)
    assert names[0] == names[1] != names[2]


def test_each_custom_id_has_one_record(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = BatchOutput(path)
    for custom_id in ("a", "b\u2028", "a"):
        output.answer({"custom_id": custom_id})
    assert len(path.read_text("utf-8").splitlines()) == 2
    output.fail({"custom_id": "c"})
    output.fail({"custom_id": "a"})
    assert (output.answered, output.failed) == (2, 1)
    output.close(finished=False)
    again = BatchOutput(path, retry_failed=True)
    assert (again.answered, again.failed, len(again.ids)) == (2, 0, 2)
    assert again.run != output.run
    again.close(finished=False)
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_no_part_of_a_record_is_written_to_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = BatchOutput(path)
    output.answer({"custom_id": "a"})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))
    try:
        with pytest.raises(OSError, match=r"out\.jsonl"):
            output.answer({"custom_id": "b", "response": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (output.answered, len(output.ids)) == (1, 1)
    output.answer({"custom_id": "c"})  # a line whose job has ended before
    output.close(finished=False)
    again = BatchOutput(path)
    assert (again.answered, again.run) == (2, output.run)
    assert "b" not in again.ids
    again.close(finished=False)


def test_the_output_is_never_a_file_named_minus() -> None:
    with pytest.raises(BatchFault, match="needs a file as output, got -"):
        OutputPaths.of(Path("-"))


def test_the_output_is_never_a_pipe(tmp_path: Path) -> None:
    """Reading its earlier answers would never end."""
    for name in ("out.jsonl", "other.errors.jsonl"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(BatchFault, match=rf"{name}: a batch needs a file as output, not a pipe"):
            BatchOutput(tmp_path / name.replace(".errors", ""))


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl", "out.jsonl.run", "out.jsonl.run.new"])
def test_no_output_may_be_the_input(tmp_path: Path, name: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(_line())
    paths = OutputPaths.of(tmp_path / "out.jsonl")
    paths.check_differs_from(source)
    (tmp_path / name).symlink_to(source)
    with pytest.raises(BatchFault, match=name.replace(".", r"\.") + ": the output would overwrite"):
        paths.check_differs_from(source)


def test_the_id_of_a_request_depends_on_its_model() -> None:
    line = BatchLine(1, "a", "/v1/chat/completions", {"model": "demo", "messages": []})
    assert request_id(line, "run", None) == request_id(line, "run", "demo") != request_id(line, "run", "other")


@pytest.mark.parametrize("text", ["dear diary\n", "dear diary", '{"custom_id":"a"}\ndear diary', "[1]\n"])
def test_a_file_that_is_no_batch_output_is_not_changed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(BatchFault, match=r"out\.jsonl.*--overwrite"):
        BatchOutput(path)
    assert path.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    BatchOutput(path, overwrite=True).close(finished=True)
    assert path.read_text() == ""


def test_plain_lines_are_bodies_that_are_named_by_their_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "custom_id": "hello", "model": "demo"}
    path.write_text('{"prompt": "Once", "max_tokens": 5}\n\n' + json.dumps(chat) + "\n" + _line() + "\n")
    once, hello, full = read_lines(path)
    assert (once.custom_id, once.url, once.body) == ("line-1", "/v1/completions", {"prompt": "Once", "max_tokens": 5})
    assert (hello.custom_id, hello.url) == ("hello", "/v1/chat/completions")
    assert hello.body == {"messages": chat["messages"], "model": "demo"}
    assert full.custom_id == "a"
    found = survey(path, model=None)
    assert (found.lines, found.modelless, dict(found.models)) == (3, 1, {"demo": 3})


def test_invalid_lines_can_be_skipped_and_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [
        _line(),
        "{",
        _line(),
        _line(custom_id="b", method="GET"),
        "x" * (MAX_LINE_BYTES + 1000),
        _line(custom_id="c"),
    ]
    path.write_text("\n".join(lines) + "\n")
    found = survey(path, model=None, skip_invalid=True)
    assert found.lines == 6
    attempts = list(attempt_lines(path))
    assert [line.custom_id for line in attempts] == ["a", "line-2", "line-3", "b", "line-5", "c"]
    assert [isinstance(line, LineFault) for line in attempts] == [False, True, True, True, True, False]
    assert all(line.custom_id in found.ids for line in attempts)
    with pytest.raises(BatchFault, match=r"in\.jsonl:2: .*\n.*in\.jsonl:3: custom_id 'a' was used before"):
        survey(path, model=None)


def test_a_batch_from_standard_input_is_resumed_only_with_the_same_input(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    first = spool(io.BytesIO(b"one\n"), target, overwrite=False)
    assert first.read_bytes() == b"one\n"
    target.write_text('{"custom_id": "line-1"}\n')
    assert spool(io.BytesIO(b"one\n"), target, overwrite=False) == first
    with pytest.raises(BatchFault, match=r"has another input.*batch run .*out\.jsonl\.in -o"):
        spool(io.BytesIO(b"two\n"), target, overwrite=False)
    assert first.read_bytes() == b"one\n"
    first.unlink()  # the batch was finished
    with pytest.raises(BatchFault, match="answers of an earlier run"):
        spool(io.BytesIO(b"two\n"), target, overwrite=False)
    assert spool(io.BytesIO(b"two\n"), target, overwrite=True).read_bytes() == b"two\n"
    with pytest.raises(BatchFault, match="longer than"):
        spool(io.BytesIO(b"x" * 11), target, overwrite=True, max_bytes=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.in"]
