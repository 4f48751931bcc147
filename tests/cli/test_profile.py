"""`--profile` of the local commands, and `ktqueue profile` on what they wrote."""

from pathlib import Path

import pytest

from ktqueue.cli.main import run
from ktqueue.profiling.folder import read_profile

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
    for words in ("bench", "rows", "prompts", "3-4", "launch", "share", "of memory", "probe"):
        assert words in shown


def test_a_missing_profile_is_an_error_of_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", str(tmp_path / "absent")]) == 2
    assert "absent is not a folder; --profile" in capsys.readouterr().err


def test_chat_profiles_only_a_local_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--profile", str(tmp_path)]) == 2
    assert "--profile needs --local" in capsys.readouterr().err
