"""The mutation list fits the code: each edit finds its place, and each test exists."""

import re
from pathlib import Path

import pytest
from mutations import MUTATIONS, ROOT, Mutation

FILES = Path(__file__).parent.glob("*.py")


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_every_mutation_finds_its_place(mutation: Mutation, tmp_path: Path) -> None:
    copy = tmp_path / mutation.path
    copy.parent.mkdir(parents=True, exist_ok=True)
    before = (ROOT / mutation.path).read_text()
    copy.write_text(before)
    assert mutation.apply(tmp_path) == before
    assert copy.read_text() != before


def test_no_mutation_hides_another_of_the_same_name() -> None:
    written = sum(len(re.findall(r'^    ".*": Mutation\($', path.read_text(), re.M)) for path in FILES)
    assert written == len(MUTATIONS)


def test_a_mutation_without_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").write_text("twice twice")
    for old in ("twice", "never"):
        with pytest.raises(ValueError, match=f"code has . times, not once: '{old}'"):
            Mutation("code", old, "", ()).apply(tmp_path)


@pytest.mark.parametrize("test", sorted({test for mutation in MUTATIONS.values() for test in mutation.tests}))
def test_every_test_of_a_mutation_exists(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"def {name.partition('[')[0]}\b", (ROOT / path).read_text())
