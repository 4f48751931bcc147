"""`ktqueue bench engine` on a tiny model: its tables, its JSON, its refusals. Figures are not compared."""

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
    assert [one["rows"] for one in found["decode"]] == [1, 3]
    for one in found["decode"]:
        assert one["tokens"] == 3 * one["rows"]  # the first token of each comes before the clock starts
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
        assert f"{one['tokens_per_second']:,.1f}" in shown
        assert 0 < one["fastest_step"] <= one["step"]
    assert [one["tokens"] for one in found["prefill"]] == [20, 700]
    assert found["engine"]["max_num_batched_tokens"] >= 700  # a prompt is read in one step
    assert found["packages"]["torch"]
    assert found["cpu"]


def test_json_on_standard_output_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_what_cannot_be_measured_is_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TINY, *flags]) != 0
    assert said in capsys.readouterr().err
