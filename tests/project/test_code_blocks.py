"""Every code block has a language and is valid in it, even if no test can run it: see tests/docs.

A block that is not run says why. Commands have verbs and flags that exist; `make` and
`python -m` have targets and modules that exist; settings and rules are read by our own readers.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pages import LANGUAGES, PYTHON, REASONS, ROOT, SHELL, Block, blocks, pages
from verbs import tree

from ktqueue.core.config import load_config

BLOCKS = [block for page in pages() for block in blocks(page)]


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def test_every_block_has_a_language() -> None:
    assert [f"{block.place}: {block.language!r}" for block in BLOCKS if block.language not in LANGUAGES] == []


def test_each_page_has_blocks_that_run() -> None:
    assert sum(bool(block.runnable.strip()) for block in of(SHELL)) >= 15
    assert sum(bool(block.runnable.strip()) for block in of(PYTHON)) >= 4


def test_a_block_that_is_not_run_says_why() -> None:
    for block in BLOCKS:
        for reason in block.reasons():
            assert reason.startswith(REASONS), f"{block.place}: {reason}"


def test_shell_blocks_parse() -> None:
    for block in of(SHELL):
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block.place}: {done.stderr}"


def test_python_blocks_compile() -> None:
    for block in of(PYTHON):
        compile(block.text, block.place, "exec")


def test_json_blocks_are_json() -> None:
    for block in of("json"):
        for line in block.text.splitlines() if block.text.startswith("{") else [block.text]:
            json.loads(line)


def test_settings_are_read_by_our_reader(tmp_path: Path) -> None:
    for block in of("toml"):
        path = tmp_path / "ktqueue.toml"
        path.write_text(block.text)
        path.chmod(0o600)
        load_config(path)


def test_rules_are_read_by_our_reader(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from ktqueue.loading.rules import load_rules
    from ktqueue.operators.registry import OPERATORS

    for block in of("yaml"):
        path = tmp_path / "rules.yaml"
        path.write_text(block.text)
        assert load_rules(path, OPERATORS), block.place


def commands() -> list[tuple[str, str]]:
    """Every `ktqueue` command in blocks and lines of a page, with its place."""
    found = [(block.place, command) for block in of(SHELL) for command in block.commands()]
    for page in pages():
        inline = re.findall(r"`((?:ktqueue|make) [^`]+)`", page.read_text(encoding="utf-8"))
        found += [(str(page.relative_to(ROOT)), command) for command in inline]
    return found


def test_commands_have_verbs_and_flags_that_exist() -> None:
    leaves = tree()
    groups = {path[0] for path in leaves}
    for place, command in commands():
        for text in re.findall(r"(?:^|\$\()ktqueue ([^|)]+)", command):
            words = text.split()
            path = next((tuple(words[:n]) for n in (2, 1) if tuple(words[:n]) in leaves), None)
            if path is None:  # a group of commands, such as `ktqueue jobs`
                of_all = words in (["COMMAND", "--help"], ["--install-completion"], ["--show-completion"])
                assert of_all or (words[0] in groups and len(words) == 1), f"{place}: {command}"
                continue
            known = {option for param in leaves[path].params for option in (*param.opts, *param.secondary_opts)} | {
                "--help"
            }
            for word in words[len(path) :]:
                if re.fullmatch(r"--?[a-z][a-z-]*", word):
                    assert word in known, f"{place}: {command}: no {word}"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_has_the_targets_that_pages_name() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", text, re.MULTILINE))
    for place, command in commands():
        if found := re.match(r"make((?: [a-z]+)+)", command):
            assert set(found[1].split()) <= targets, f"{place}: {command}"


def test_modules_that_pages_run_exist() -> None:
    for page in pages():
        for module in re.findall(r"python -m (benchmarks(?:\.\w+)+)", page.read_text(encoding="utf-8")):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page.name}: {module}"


def test_show_chooses_tests_that_exist() -> None:
    """`-k` searches in names, so each of its words must be in a file that the command names."""
    for command in re.findall(r"ARGS=\"([^\"]+)\"", (ROOT / "docs" / "show.md").read_text()):
        before, _, chosen = command.partition(" -k ")
        files = [ROOT / name for name in before.split() if name.startswith("tests")]
        sources = [path for file in files for path in ([file] if file.is_file() else file.rglob("*.py"))]
        for word in re.findall(r"\w+", chosen.strip("'")):
            if word not in ("and", "or", "not"):
                assert any(word in f"{path.stem} {path.read_text()}" for path in sources), f"{command}: {word}"
