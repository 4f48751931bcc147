"""`python -m benchmarks.run` says in a line what is wrong with its command line."""

import pytest

from benchmarks import run


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cpu", "systen"], "there is no benchmark 'systen'"),
        (["cpu", "--llama-python", "/no/python"], "argument --llama-python: there is no program '/no/python'"),
        (["cpu", "--model", "nowhere.gguf"], "nowhere.gguf: no such file or folder"),
    ],
)
def test_a_wrong_command_line(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", *words])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    assert f"run.py: error: {says}" in capsys.readouterr().err
