"""`ktqueue bench engine` on a tiny model: its tables, JSON and errors. Figures are not compared."""

import json
from pathlib import Path

import pytest

from ktqueue.cli.main import run

TINY = ["bench", "engine", "--model", "synthetic:tiny:q4_k_m", "--prompt-tokens", "5", "--output-tokens", "4"]


def test_rows_and_prompts_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "found.json"
    assert run([*TINY, "--rows", "1,3", "--prefill", "20,700", "--rounds", "2", "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    found = json.loads(target.read_text())
    assert [figure["rows"] for figure in found["decode"]] == [1, 3]
    for figure in found["decode"]:
        assert figure["tokens"] == 3 * figure["rows"]  # the first token of each row precedes the measurement
        assert figure["tokens_per_second"] == pytest.approx(figure["tokens"] / figure["seconds"])
        assert f"{figure['tokens_per_second']:,.1f}" in shown
        assert 0 < figure["fastest_step"] <= figure["step"]
    assert [figure["tokens"] for figure in found["prefill"]] == [20, 700]
    assert found["engine"]["max_num_batched_tokens"] >= 700  # a prompt is read in one step
    assert found["packages"]["torch"]
    assert found["cpu"]


def test_bench_engine_writes_only_json_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TINY, "--rows", "2", "--prefill", "0", "--rounds", "1", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prefill"] == []
    assert found["decode"][0]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rows", "0"], "--rows"),
        (["--rows", "1,two"], "two"),
        (["--prefill", ""], "--prefill"),
        (["--model", "synthetic:none:q4_k_m"], "unknown shape 'none'"),
    ],
)
def test_a_wrong_flag_of_bench_engine_is_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TINY, *flags]) != 0
    assert said in capsys.readouterr().err
