"""Uses of experts are kept over restarts: a small file for each model, shared by workers, and safe when damaged."""

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ktqueue.core.config import EngineConfig
from ktqueue.core.expert_work import ExpertUses, ExpertWork, PlacesExperts
from ktqueue.workers.startup import expert_history
from ktqueue.workers.startup.expert_history import MOST_USES, ExpertHistory, UsesFile, start_expert_history

DIGEST = "ab" * 32
SHAPE = [3, 2]


class Experts:
    """Counts uses, and notes what is placed."""

    depends_on_uses = True

    def __init__(self) -> None:
        self.uses = [[7, 7, 7], [2**32 - 1, 7]]  # of steps that warm up
        self.placed: ExpertUses | None = None

    def expert_work(self) -> ExpertWork:
        return ExpertWork()

    def expert_uses(self) -> ExpertUses:
        return [[*layer] for layer in self.uses]

    def count_each_step(self) -> None:
        pass

    def place_experts(self, uses: ExpertUses) -> None:
        self.placed = uses

    def use(self, layer: int, expert: int, times: int) -> None:
        self.uses[layer][expert] = (self.uses[layer][expert] + times) % 2**32


def file(folder: Path) -> UsesFile:
    return UsesFile(folder, DIGEST, SHAPE)


def worker(folder: Path, *uses: tuple[int, int, int]) -> Experts:
    """A worker that starts, uses experts and ends."""
    model = Experts()
    assert isinstance(model, PlacesExperts)
    history = ExpertHistory(file(folder), model)
    for use in uses:
        model.use(*use)
    history.close()
    return model


def test_a_worker_begins_with_the_uses_of_those_before(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "made"
    assert worker(folder, (0, 1, 5), (1, 0, 3)).placed == [[0, 0, 0], [0, 0]]
    assert worker(folder, (0, 1, 1), (0, 2, 4)).placed == [[0, 5, 0], [3, 0]]
    assert worker(folder).placed == [[0, 6, 4], [3, 0]]
    assert sorted(path.name for path in folder.iterdir()) == [f"{DIGEST}.json", "lock"]


def test_uses_are_saved_while_a_worker_runs(tmp_path: Path) -> None:
    model = Experts()
    history = ExpertHistory(file(tmp_path), model, save_seconds=0.01)
    model.use(0, 2, 9)
    while file(tmp_path).read() is None:
        pass
    model.use(0, 2, 1)
    history.close()
    assert file(tmp_path).read() == [[0, 0, 10], [0, 0]]


def test_workers_may_write_at_the_same_time(tmp_path: Path) -> None:
    def add() -> None:
        mine = file(tmp_path)
        for _ in range(25):
            mine.add([[1, 0, 2], [0, 1]])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file(tmp_path).read() == [[100, 0, 200], [0, 100]]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"v":1,"uses":[[1,2',
        b"\x80\x05pickle",
        b"[]",
        b'{"v":2,"uses":[[1,2,3],[4,5]]}',
        b'{"v":1,"uses":[[1,2,3]]}',
        b'{"v":1,"uses":[[1,2,3],[4,5,6]]}',
        b'{"v":1,"uses":[[1,2,3],[4,-5]]}',
        b'{"v":1,"uses":[[1,2,3],[4,1e30]]}',
        b'{"v":1,"uses":[[1,2,3],[4,true]]}',
        b'{"v":1,"uses":[[1,2,3],[4,99999999999]]}',
        b'{"v":1,"uses":[[1,2,3],7]}',
    ],
)
def test_a_damaged_file_counts_as_none(data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file(tmp_path).add([[1, 2, 3], [4, 5]])
    file(tmp_path).path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert worker(tmp_path, (1, 1, 8)).placed == [[0, 0, 0], [0, 0]]
    assert f"{DIGEST}.json has no uses" in caplog.text
    assert file(tmp_path).read() == [[0, 0, 0], [0, 8]]


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_history, "MOST_BYTES", 100)
    file(tmp_path).path.write_bytes(b'{"v":1,"uses":[[1,2,3],[4,5]]}' + b" " * 100)
    assert file(tmp_path).read() is None
    monkeypatch.setattr(expert_history, "MOST_FILES", 3)
    (tmp_path / "of somebody else.json").write_text("{}")
    for number in range(5):
        UsesFile(tmp_path, f"{number}" * 8, SHAPE).add([[1, 2, 3], [4, 5]])
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert (tmp_path / "of somebody else.json").exists()
    assert (tmp_path / "44444444.json").exists()


def test_old_uses_lose_weight(tmp_path: Path) -> None:
    file(tmp_path).add([[MOST_USES, 0, 0], [0, 1]])
    file(tmp_path).add([[0, MOST_USES, 0], [0, 1]])
    assert file(tmp_path).read() == [[MOST_USES // 2, MOST_USES // 2, 0], [0, 2]]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        worker(tmp_path / "file", (0, 0, 1))
    assert "are not kept for the next start" in caplog.text


def test_nothing_is_written_without_uses(tmp_path: Path) -> None:
    worker(tmp_path)
    assert list(tmp_path.iterdir()) == []


def built(model: object, digest: str = DIGEST) -> Any:
    return SimpleNamespace(model=SimpleNamespace(module=model), card=SimpleNamespace(digest=digest))


def test_the_folder_is_that_of_the_settings_or_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for setting, folder in ((None, tmp_path / "cache/ktqueue/experts"), (str(tmp_path / "own"), tmp_path / "own")):
        model = Experts()
        history = start_expert_history(EngineConfig(expert_uses_dir=setting), built(model))
        assert history is not None
        model.use(0, 0, 2)
        history.close()
        assert UsesFile(folder, DIGEST, SHAPE).read() == [[2, 0, 0], [0, 0]]


def test_some_models_have_no_history(tmp_path: Path) -> None:
    config = EngineConfig(expert_uses_dir=str(tmp_path))
    on_cpu, counting = Experts(), object()
    on_cpu.depends_on_uses = False
    assert [start_expert_history(config, built(model)) for model in (on_cpu, counting)] == [None, None]
    for setting, digest in (("off", DIGEST), (str(tmp_path), ""), (str(tmp_path), "../../etc/x")):
        model = Experts()
        assert start_expert_history(EngineConfig(expert_uses_dir=setting), built(model, digest)) is None
        assert model.placed == [[0, 0, 0], [0, 0]]  # steps that warmed up are forgotten
    assert not [*tmp_path.iterdir()]
