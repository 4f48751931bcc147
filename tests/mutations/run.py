"""`make mutations`: breaks one promise after another in a copy of the tree and checks that tests fail.

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

TESTS_FAILED = 1  # pytest's exit code; any other code except 0 means that they did not run
# An editable installation would import the original package instead of the copy, so its finder is removed. The finder
# of the kernels stays, because they are not compiled again for the copy.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "_editable_skbc_ktqueue"]
"""


def copy_to(folder: Path) -> None:
    """Copy the files of the tree, except those that git ignores."""
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
    """Run the tests in the copy. Returns pytest's exit code, the tests that passed, and the output."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--quiet",
        "--no-header",
        "--timeout=60",
        "--tb=short",
        "-rp",
        "-m",
        "",
        *tests,
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    return done.returncode, {line[7:] for line in output.splitlines() if line.startswith("PASSED ")}, output


def check(name: str, folder: Path) -> set[str]:
    """Break one promise. Returns the tests that did not fail."""
    mutation = MUTATIONS[name]
    before = mutation.apply(folder)
    try:
        code, passed, output = run(folder, mutation.tests)
    finally:
        (folder / mutation.path).write_text(before, encoding="utf-8")
    if code not in (0, TESTS_FAILED):
        raise RuntimeError(f"{name}: pytest gave {code}\n{output}")
    return passed


def main() -> int:
    """Run the mutations of the command line. Returns 1 if a mutation was not seen."""
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
        assert all(Path(path).is_relative_to(folder) for path in found), f"not the copy: {found}"
        code, _, output = run(folder, list(dict.fromkeys(test for name in names for test in MUTATIONS[name].tests)))
        if code != 0:
            sys.stdout.write(f"{output}\nthese tests must pass before anything is broken\n")
            return 1
        unseen = 0
        for name in names:
            began = time.monotonic()
            silent = check(name, folder)
            unseen += bool(silent)
            result = (
                f"NOT SEEN by {', '.join(sorted(silent))}" if silent else f"seen ({time.monotonic() - began:.0f} s)"
            )
            sys.stdout.write(f"{name}: {result}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(names) - unseen} of {len(names)} mutations were seen\n")
    return min(1, unseen)


if __name__ == "__main__":
    sys.exit(main())
