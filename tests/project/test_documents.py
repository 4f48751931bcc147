"""The reference pages describe exactly the settings, commands, errors, metrics and scripts of the code."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verbs import flag_table, tree

from ktqueue.broker.scripts import PRELUDES
from ktqueue.cli.config import reference
from ktqueue.core.config import STANDALONE, all_settings
from ktqueue.core.errors import KtqueueError
from ktqueue.loading.synthetic.shapes import SHAPES
from tests.served.families import served_families
from tests.served.page import PAGE, RESULT, render

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def test_the_settings_page_is_made_from_the_settings() -> None:
    page = (REFERENCE / "configuration.md").read_text()
    assert reference() in page, "paste the output of `ktqueue config --markdown` into docs/reference/configuration.md"


def test_the_page_of_models_is_made_from_the_tables_of_the_code() -> None:
    result = json.loads(RESULT.read_text())
    served = {family.class_name: family.model_type for family in served_families()}
    tested = {row["class"] for row in result["figures"]}
    missing = [model_type for name, model_type in served.items() if name not in tested]
    assert not missing, f'run `make models ARGS="{" ".join(missing)}"`'
    assert tested <= served.keys()
    assert PAGE.read_text() == render(result), "run `make models ARGS=--page`"


def test_flags_of_settings_exist() -> None:
    flags = {option for command in tree().values() for param in command.params for option in param.opts}
    named = {flag.partition("/")[0] for described in all_settings() for flag in described.about.flags}
    assert named <= flags


def test_every_verb_is_documented() -> None:
    page = (REFERENCE / "cli.md").read_text()
    documented = set(re.findall(r"^\| `ktqueue ([a-z ]+)` \|", page, re.MULTILINE))
    assert documented == {" ".join(path) for path in tree()}


def test_the_table_of_flags_is_made_from_the_command_line() -> None:
    assert (REFERENCE / "cli.md").read_text().endswith("\n\n" + flag_table()), "run `python tests/helpers/verbs.py`"


def test_every_code_of_a_faulty_batch_is_documented() -> None:
    place_of_code = {"refuse": 0, "fault": 1}
    known: set[Any] = set()
    for path in (ROOT / "ktqueue" / "batches").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            place = place_of_code.get(getattr(called, "id", getattr(called, "attr", "")))
            if isinstance(node, ast.Call) and place is not None:
                known |= {part.value for part in node.args[place : place + 1] if isinstance(part, ast.Constant)}
    page = (REFERENCE / "http-api.md").read_text().partition("whose file is faulty:")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", page)) == known


def test_tests_named_in_documents_exist() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for name in re.findall(r"\btests(?:/\w+)+(?:\.py)?", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_every_shape_is_documented() -> None:
    page = (ROOT / "docs" / "guides" / "how-fast.md").read_text()
    listed = page.partition("There are shapes of these models:")[2].partition("The type is")[0]
    assert {name.strip() for line in re.findall(r"^- .*: (.+)$", listed, re.MULTILINE) for name in line.split(",")} == (
        SHAPES.keys()
    )


def error_classes(kind: type[KtqueueError] = KtqueueError) -> Iterator[type[KtqueueError]]:
    for child in kind.__subclasses__():
        yield child
        yield from error_classes(child)


def test_every_error_of_the_api_is_documented_under_its_status() -> None:
    pytest.importorskip("starlette")
    import ktqueue.gateway.app
    import ktqueue.workers.arq.webhooks
    import ktqueue.workers.generation.generation_worker
    import ktqueue.workers.supervision.supervisor  # noqa: F401  # makes the errors of each known

    page = (REFERENCE / "http-api.md").read_text()
    documented = {
        (int(status), code)
        for status, codes in re.findall(r"^\| (\d{3}) \| (.+?) \|", page, re.MULTILINE)
        for code in re.findall(r"`(\w+)`", codes)
    }
    every = {(error.status, error.code) for error in error_classes() if error.__module__.startswith("ktqueue.")}
    internal = {  # messages on a terminal or in a log, which show no code
        "codec_error", "config_error", "checkpoint_error", "rule_error", "lease_lost", "usage", "engine_stalled",
        "not_stored", "process_failed", "refused", "webhook_undelivered", "webhook_undeliverable",
    }  # fmt: skip
    known = {(status, code) for status, code in every if code not in internal and not code.startswith("cli_")}
    assert documented - known == {(500, "internal_error")} - known, "documented, but not in the code"
    assert known - documented == set(), "in the code, but not documented"


def test_every_metric_is_documented() -> None:
    pytest.importorskip("prometheus_client")
    page = (REFERENCE / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `ktqueue:(\w+)` \|", page, re.MULTILINE))
    known: set[str] = set()
    for name in ("metrics.py", "cluster_metrics.py", "health.py"):
        for text in strings(ROOT / "ktqueue" / "gateway" / name):
            known.update([text.removeprefix("ktqueue:")] if text.removeprefix("ktqueue:") in documented else [])
            assert not text.startswith("ktqueue:") or len(text) == 8 or text.removeprefix("ktqueue:") in documented, (
                text
            )
    assert documented == known


def strings(path: Path) -> Iterator[str]:
    """Every string constant of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_script_is_documented() -> None:
    page = (REFERENCE / "keys-and-scripts.md").read_text()
    rows = [row for row in page.partition("| script |")[2].splitlines() if row.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented == {path.stem for path in (ROOT / "ktqueue" / "broker" / "lua").glob("*.lua")} - set(PRELUDES)


def test_environment_variables_in_the_code_are_documented() -> None:
    page = (REFERENCE / "configuration.md").read_text()
    for name in STANDALONE:
        assert f"| `{name}` |" in page
    for path in [*(ROOT / "ktqueue").rglob("*.py"), *(ROOT / "workers").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]:
        for name in re.findall(r"\"(KTQUEUE_[A-Z_]+[A-Z])\"", path.read_text()):
            assert f"`{name}`" in page, f"{path.name} reads {name}"
