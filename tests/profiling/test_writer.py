"""Files of a profile: their names, rotation, drops, and what a reader makes of torn ones."""

import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ktqueue.core.codec import dumps, loads
from ktqueue.core.errors import ConfigError
from ktqueue.core.settings.profile import ProfileConfig
from ktqueue.profiling.folder import ProfileError, read_profile
from ktqueue.profiling.records import STEP_PARTS
from ktqueue.profiling.writer import RecordWriter

AT = 2e9  # in the future, so that the time of the process's own lines does not matter


@dataclass(frozen=True)
class Numbered:
    """A record of one line, which has its number as the time in seconds."""

    number: int

    def lines(self, wall: float) -> bytes:
        counts = dict.fromkeys(("rows", "tokens", "prompt_tokens", "pages_used"), 1)
        times = dict.fromkeys(("seconds", *STEP_PARTS), 0.0)
        return dumps({"step": self.number, "at": AT + self.number, **counts, **times}) + b"\n"


@dataclass(frozen=True)
class Blocking:
    """A record that holds up the writer's thread until the test says so."""

    reached: threading.Event
    go_on: threading.Event

    def lines(self, wall: float) -> bytes:
        self.reached.set()
        assert self.go_on.wait(60)
        return Numbered(0).lines(wall)


def write(folder: Path, numbers: range, **settings: int) -> None:
    writer = RecordWriter(ProfileConfig(folder=str(folder), **settings), {"role": "test", "model": "m"})
    for number in numbers:
        writer.put("steps", Numbered(number))
    writer.close()


def test_records_come_back_in_order_with_the_facts_of_their_process(tmp_path: Path) -> None:
    write(tmp_path / "new" / "folder", range(1, 1001))
    (process,) = read_profile(tmp_path / "new" / "folder")
    assert [line["step"] for line in process.steps] == list(range(1, 1001))
    assert (process.head["role"], process.head["pid"]) == ("test", os.getpid())
    assert process.losses == []


def test_several_runs_share_a_folder(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    write(tmp_path, range(5, 8))
    first, second = read_profile(tmp_path)
    assert [[line["step"] for line in process.steps] for process in (first, second)] == [[1, 2], [5, 6, 7]]


def test_full_files_are_followed_by_others_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2001), file_bytes=4096, files=3)
    files = sorted(tmp_path.glob("*.steps.*.jsonl"))
    assert len(files) == 3
    assert all(path.stat().st_size <= 4096 for path in files)
    (process,) = read_profile(tmp_path)
    numbers = [line["step"] for line in process.steps]
    assert numbers == list(range(numbers[0], 2001))
    assert 1 < numbers[0] < 2001


def test_records_that_come_too_fast_are_dropped_and_counted(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()
    writer = RecordWriter(ProfileConfig(folder=str(tmp_path)), {}, most_held=10)
    writer.put("steps", Blocking(reached, go_on))
    assert reached.wait(60)
    for number in range(1, 16):
        writer.put("steps", Numbered(number))
    writer.put("steps", Numbered(99), lines=7)
    for number in range(101, 113):
        writer.put_step(Numbered(number))
    go_on.set()
    writer.close()
    (process,) = read_profile(tmp_path)
    assert [line["step"] for line in process.steps] == [*range(11), *range(101, 111)]
    assert process.dropped == 5 + 7 + 2


def test_only_the_end_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, range(1, 101))
    write(tmp_path, range(201, 211))
    for seconds, expected in ((3, [207, 208, 209, 210]), (112, [98, 99, 100, *range(201, 211)])):
        processes = read_profile(tmp_path, last_seconds=seconds)
        assert [line["step"] for process in processes for line in process.steps] == expected


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    (path,) = tmp_path.glob("*.steps.*.jsonl")
    path.write_bytes(path.read_bytes()[:-5])
    (process,) = read_profile(tmp_path)
    assert [line["step"] for line in process.steps] == [1, 2]
    assert process.losses == ["lines that were damaged: 1"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"at":2000000001,"hello":"world"}',
        b'["a list"]',
        b"\x80\x05pickle",
        Numbered(1).lines(0).strip().replace(b'"rows":1', b'"rows":null'),
        Numbered(1).lines(0).strip().replace(b'"rows":1', b'"rows":1e300'),
        Numbered(1).lines(0).strip().replace(b'"at":2000000001.0', b'"at":1e17'),
        Numbered(1).lines(0).strip() + Numbered(2).lines(0).strip(),
        Numbered(1).lines(0).strip()[:-1] + b',"cpu_bytes":"many"}',
    ],
)
@pytest.mark.parametrize("last_seconds", [None, 1.5])
def test_a_damaged_line_is_left_out_and_counted(line: bytes, last_seconds: float | None, tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    (path,) = tmp_path.glob("*.steps.*.jsonl")
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:3], line, lines[3], line, b""]))
    (process,) = read_profile(tmp_path, last_seconds=last_seconds)
    assert [step["step"] for step in process.steps] == ([1, 2, 3] if last_seconds is None else [2, 3])
    assert process.unreadable == 2


def test_a_worker_starts_on_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise one that is started again would not come back."""
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, most))
    try:
        writer = RecordWriter(ProfileConfig(folder=str(tmp_path)), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    assert "lines of the profile are dropped" in caplog.text
    writer.put("steps", Numbered(1))
    writer.close()
    (process,) = read_profile(tmp_path)
    assert len(process.steps) == 1


def test_a_full_disk_costs_lines_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RecordWriter(ProfileConfig(folder=str(tmp_path), file_bytes=24 << 10), {})
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, most))  # as if the disk were full then
    try:
        for begin in (1, 1001, 2001):  # also where the next file should begin
            before = writer.dropped
            for number in range(begin, begin + 1000):
                writer.put("steps", Numbered(number))
            while writer.dropped == before:
                time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    writer.put("steps", Numbered(9999))
    writer.close()
    (process,) = read_profile(tmp_path)
    assert process.steps[0]["step"] == 1
    assert process.steps[-1]["step"] == 9999
    assert process.dropped >= 2000
    assert [record.getMessage() for record in caplog.records] == [
        f"lines of the profile are dropped: {tmp_path}: File too large"
    ]


def test_files_of_others_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    (tmp_path / "notes.jsonl").write_text('{"a": 1, "at": 9e9}\n' * 3)
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "empty.steps.0001.jsonl").write_text("")
    (tmp_path / "torn.steps.0001.jsonl").write_text('{"v":1,"ki')
    (tmp_path / "newer.steps.0001.jsonl").write_text('{"v":2,"kind":"steps"}\n{"step":1}\n')
    (process,) = read_profile(tmp_path, last_seconds=60)
    assert len(process.steps) == 3


def test_a_folder_without_a_profile_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"absent is not a folder"):
        read_profile(tmp_path / "absent")
    with pytest.raises(ProfileError, match=r"has no profile"):
        read_profile(tmp_path)
    RecordWriter(ProfileConfig(folder=str(tmp_path)), {}).close()
    with pytest.raises(ProfileError, match=r"has no step yet"):
        read_profile(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"profile.folder .*file/below.* cannot be written"):
        RecordWriter(ProfileConfig(folder=str(tmp_path / "file" / "below")), {})


def test_heads_are_in_every_file(tmp_path: Path) -> None:
    write(tmp_path, range(1, 500), file_bytes=4096)
    for path in tmp_path.glob("*.jsonl"):
        head = loads(path.read_bytes().splitlines()[0])
        assert (head["v"], head["model"]) == (1, "m")
