"""`make mutations`: in a copy of the tree, breaks one promise after another and demands that its tests fail.

python tests/mutations/run.py [NAME ...]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutations import MUTATIONS, ROOT

TESTS_FAILED = 1  # pytest's exit code; any other says that they did not run
# An editable installation finds the package where it was installed from, before the copy that is on the path. That of
# the kernels stays: they are not compiled again for the copy.
SITE = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if type(one).__module__ != "_editable_skbc_ktqueue"]
"""


def copy_to(folder: Path) -> None:
    """The tree's files, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / "sitecustomize.py").write_text(SITE)


def run(folder: Path, tests: Sequence[str]) -> tuple[int, set[str], str]:
    """Run the tests in the copy: pytest's exit code, the tests that passed, and all that it said."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "--quiet", "--no-header", "--timeout=60", "--tb=short", "-rp", *tests]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    return done.returncode, {line[7:] for line in said.splitlines() if line.startswith("PASSED ")}, said


def check(name: str, folder: Path) -> set[str]:
    """Break one promise; the tests that did not fail."""
    mutation = MUTATIONS[name]
    before = mutation.apply(folder)
    try:
        code, passed, said = run(folder, mutation.tests)
    finally:
        (folder / mutation.path).write_text(before, encoding="utf-8")
    if code not in (0, TESTS_FAILED):
        raise RuntimeError(f"{name}: pytest gave {code}\n{said}")
    return passed


def main() -> int:
    """The command line; 1 where a mutation was not seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all")
    names = parser.parse_args().names or list(MUTATIONS)
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        folder = Path(temporary)
        copy_to(folder)
        where = "import ktqueue, ktqueue.workers; print(ktqueue.__file__, ktqueue.workers.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", where], cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        assert all(Path(one).is_relative_to(folder) for one in found), f"not the copy: {found}"
        code, _, said = run(folder, list(dict.fromkeys(test for name in names for test in MUTATIONS[name].tests)))
        if code != 0:
            sys.stdout.write(f"{said}\nthese tests must pass where nothing is broken\n")
            return 1
        unseen = 0
        for name in names:
            began = time.monotonic()
            silent = check(name, folder)
            unseen += bool(silent)
            told = f"NOT SEEN by {', '.join(sorted(silent))}" if silent else f"seen ({time.monotonic() - began:.0f} s)"
            sys.stdout.write(f"{name}: {told}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(names) - unseen} of {len(names)} mutations were seen\n")
    return min(1, unseen)


if __name__ == "__main__":
    sys.exit(main())
