"""What all commands share: help, imports, exit codes, and a clear line for each error."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import COMMAND, Run

from ktqueue.cli.config import shown_value
from ktqueue.core.config import Config, all_settings
from ktqueue.core.settings.setting import Description, Setting

ROOT = Path(__file__).resolve().parents[2]
VERBS = [
    ["up"],
    ["gateway"],
    ["worker"],
    ["submit"],
    ["jobs"],
    ["jobs", "list"],
    ["jobs", "show"],
    ["jobs", "follow"],
    ["jobs", "cancel"],
    ["batch", "run"],
    ["chat"],
    ["convert"],
    ["inspect"],
    ["bench", "experts"],
    ["doctor"],
    ["demo"],
]


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'redis', 'pydantic', 'starlette', 'httpx', 'gguf', 'asyncio'}"
    done = _python(
        f"import sys; from ktqueue.cli.main import run; run(['--help']); print(sys.modules.keys() & {heavy})"
    )
    assert done.stdout.endswith("set()\n"), done.stdout[-200:] + done.stderr


def test_a_command_imports_neither_the_others_nor_what_redis_needs_for_tokens() -> None:
    others = "{'ktqueue.cli.submit', 'ktqueue.cli.up', 'cryptography.x509'}"
    words = ["jobs", "list", "--redis-url", "redis://127.0.0.1:1"]
    done = _python(f"import sys; from ktqueue.cli.main import run; run({words}); print(sys.modules.keys() & {others})")
    assert done.stdout == "set()\n", done.stdout + done.stderr


def test_a_command_hardly_looks_for_garbage_even_at_its_end() -> None:
    """The collector writes how many objects it has in each generation when it begins. The interpreter ends with it."""
    code = "import gc; gc.set_debug(gc.DEBUG_STATS); from ktqueue.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "config"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "broker.url" in done.stdout
    objects = [
        sum(map(int, line.split(":")[2].split()))
        for line in done.stderr.splitlines()
        if line.startswith("gc: objects in each generation:")
    ]
    assert 0 < len(objects) < 20 and objects[-1] < 1_000


def test_batches_need_neither_starlette_nor_torch() -> None:
    done = _python(
        "import sys, ktqueue.cli.batch.session, ktqueue.cli.chat.talkers;"
        "print(sys.modules.keys() & {'torch', 'starlette', 'transformers', 'numpy'})"
    )
    assert done.stdout == "set()\n", done.stdout + done.stderr


@pytest.mark.parametrize("verb", ["worker", "up"])
def test_a_redis_that_is_away_is_found_before_anything_else(verb: str, tmp_path: Path) -> None:
    code = f"import sys; from ktqueue.cli.main import run; print(run(['{verb}'])); print('torch' in sys.modules)"
    done = _python(code, KTQUEUE_BROKER_URL="redis://127.0.0.1:1/0", KTQUEUE_BROKER_STATE_DIR=str(tmp_path))
    assert done.stdout == "3\nFalse\n", done.stdout + done.stderr
    assert done.stderr.startswith("ktqueue: Redis is away: ")
    assert list(tmp_path.iterdir()) == []


def test_every_verb_has_help_that_fits_80_columns() -> None:
    code = f"from ktqueue.cli.main import run\nfor verb in {VERBS!r}: assert run([*verb, '--help']) == 0"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\033" not in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["submit", "--no-such-flag"], 2, "ktqueue submit: No such option: --no-such-flag"),
        (["no-such-verb"], 2, "No such command"),
        (["up", "--workers", "257"], 2, "--workers"),
        (["submit", "hi", "--temperature", "warm"], 2, "--temperature"),
        (["submit", "hi", "--temperature", "-1"], 2, "temperature must be a number from 0 to 100, got -1.0"),
        (["submit", "hi", "--messages", "[]"], 2, "--messages"),
        (["submit", "--messages", "{"], 2, "not JSON"),
        (["submit", "@nowhere.txt"], 2, "nowhere.txt"),
        (["submit", "hi", "--model", "demo"], 3, "ktqueue up"),
        (["submit", "hi", "--redis-url", "redis://127.0.0.1:1"], 3, "127.0.0.1:1"),
        (["jobs", "list", "--redis-url", "redis://127.0.0.1:1"], 3, "127.0.0.1:1"),
        (["chat", "--base-url", "http://127.0.0.1:1"], 3, "127.0.0.1:1"),
        (["chat", "--local", "--base-url", "http://x"], 2, "--local"),
        (["jobs", "list", "--config", "nowhere.toml"], 2, "nowhere.toml"),
        (["batch", "run", "nowhere.jsonl", "-o", "out.jsonl"], 2, "nowhere.jsonl"),
        (["jobs", "list", "--config", "."], 2, "ktqueue: .: Is a directory"),
        (["submit", "@."], 2, "ktqueue: @.: Is a directory"),
        (["submit", "--messages", "chat.json"], 2, "(a file is @FILE)"),
        (["submit", "hi", "--max-tokens", "2147483648"], 2, "max_tokens must be an integer from 0 to 2147483647"),
        (["convert", "demo", "out.gguf"], 2, "demo is already a GGUF file"),
        (["convert", "synthetic:tiny:q4_0", "nowhere/out.gguf"], 2, "nowhere/out.gguf cannot be written"),
        (["bench", "serve", "--json", "nowhere/x.json"], 2, "nowhere/x.json cannot be written"),
        (["bench", "serve", "--compare", "nowhere.json"], 2, "nowhere.json"),
        (["bench", "engine", "--json", "nowhere/x.json"], 2, "nowhere/x.json cannot be written"),
        (["bench", "experts", "--json", "nowhere/x.json"], 2, "nowhere/x.json cannot be written"),
        (["up", "--model", ""], 2, "--model: engine.model must be a text that is not empty"),
        (("submit", "--class", "bulk", "x"), 2, "submit: Invalid value for '--class': 'bulk' is not one of"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(ktqueue: Run, words: tuple[str, ...], code: int, says: str) -> None:
    done = ktqueue(*words)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("words", "code"), [("config >&-", 0), ("config --port 65536 2>&-", 2)])
def test_a_closed_output_changes_no_exit_code(words: str, code: int) -> None:
    shell = ["sh", "-c", f"{shlex.join(COMMAND)} {words}"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_an_unknown_setting_suggests_the_nearest(ktqueue: Run) -> None:
    done = ktqueue("jobs", "list", env={"KTQUEUE_BROKER_URLL": "x"})
    assert done.returncode == 2
    assert "did you mean 'url'" in done.stderr


def test_a_flag_wins_over_the_environment_and_that_over_the_file(ktqueue: Run, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('[broker]\nurl = "redis://127.0.0.1:1"\n')
    by_file = ktqueue("jobs", "list", "--config", "settings.toml")
    by_environment = ktqueue(
        "jobs", "list", "--config", "settings.toml", env={"KTQUEUE_BROKER_URL": "redis://127.0.0.1:2"}
    )
    by_flag = ktqueue(
        "jobs", "list", "--redis-url", "redis://127.0.0.1:3", env={"KTQUEUE_BROKER_URL": "redis://127.0.0.1:2"}
    )
    ports = [next(port for port in "123" if f":{port}" in done.stderr) for done in (by_file, by_environment, by_flag)]
    assert ports == ["1", "2", "3"]


def test_config_never_shows_a_secret(ktqueue: Run) -> None:
    """Each setting whose description says `secret` is hidden, in the table and in JSON."""
    secrets = [described for described in all_settings() if described.about.secret]
    assert "control.webhook_secret" in [described.key for described in secrets]
    for described in secrets:
        variable = f"KTQUEUE_{described.section}_{described.name}".upper()
        environment = {variable: "whsec_" + "c2VjcmV0" * 4}
        shown = ktqueue("config", env=environment)
        assert shown.returncode == 0, shown.stderr
        assert "c2VjcmV0" not in shown.stdout + shown.stderr
        as_json = json.loads(ktqueue("config", "--json", env=environment).stdout)
        assert as_json[described.key]["value"] == "(set)"


def test_a_new_secret_would_be_hidden_by_its_description() -> None:
    described = Setting("log", "format", str, False, None, Description(help="A key.", secret=True))
    assert shown_value(described, Config()) == "(set)"


def test_debug_shows_a_traceback(ktqueue: Run) -> None:
    done = ktqueue("jobs", "list", "--redis-url", "redis://127.0.0.1:1", "--debug")
    assert done.returncode == 3
    assert "Traceback" in done.stderr


def test_after_two_dashes_debug_is_part_of_the_prompt(ktqueue: Run) -> None:
    done = ktqueue("submit", "--redis-url", "redis://127.0.0.1:1", "--", "--debug")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_version_is_printed(ktqueue: Run) -> None:
    done = ktqueue("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("ktqueue 0.")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs_and_flags(ktqueue: Run, shell: str) -> None:
    def completed(line: str) -> str:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)} if shell == "bash" else {}
        request = {"_KTQUEUE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line, **words}
        return ktqueue(env={**request, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}).stdout

    assert "batch" in completed("ktqueue ba")
    assert "--detach" in completed("ktqueue up --det")


def test_a_flag_for_several_names_can_be_repeated(ktqueue: Run) -> None:
    flags = ("--served-model-name", "tales", "--served-model-name", "gpt-4o,teller")
    shown = ktqueue("config", "--json", *flags).stdout
    assert json.loads(shown)["engine.served_model_name"]["value"] == ["tales", "gpt-4o", "teller"]
