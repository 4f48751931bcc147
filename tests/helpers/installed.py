"""ktqueue as a user installs it: the wheel of this tree in a separate virtual environment."""

import fcntl
import importlib.util
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
BUILD = ["wheel", "--quiet", "--no-deps", "--no-build-isolation"]
"""Builds use the tools of the tests' environment, so unchanged kernels are not compiled again."""


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of a source folder or source distribution into `folder`, which contains no wheel."""
    subprocess.run([sys.executable, "-m", "pip", *BUILD, "--wheel-dir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def installed_bin(folder: Path) -> Path:
    """The folder with `ktqueue` and `python` of an environment where the wheel is installed, all extras included.

    The environment is made once in `folder` (an absolute path, best one for all processes of a test run); other
    processes wait for it. Dependencies are borrowed from the environment that runs the tests. Programs there do not
    import from this tree: a line of a .pth file adds a folder to the path, but no .pth file of that folder is read.
    """
    environment = folder / "environment"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            packages = _new_environment(folder, environment)
            borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
            (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
            _copy_kernels(packages)
            _check(environment, folder, "ktqueue.operators.native")
            (folder / "complete").touch()
    return environment / "bin"


def client_bin(folder: Path) -> Path:
    """The same without extras, as `pip install ktqueue` makes it. It can import only what a client needs."""
    environment = folder / "environment"
    packages = _new_environment(folder, environment)
    for distribution in _closure("ktqueue"):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(distribution.locate_file(name))))
    _check(environment, folder, "ktqueue.client")
    return environment / "bin"


def _new_environment(folder: Path, environment: Path) -> Path:
    """Make a virtual environment with the wheel of this tree. Returns its site-packages."""
    shutil.rmtree(environment, ignore_errors=True)
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    venv.create(environment, symlinks=True)
    wheel = build_wheel(ROOT, folder / "wheel")
    python = ["--python", str(environment / "bin" / "python")]
    command = [sys.executable, "-m", "pip", "--quiet", *python, "install", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run(command, check=True)
    return next(environment.glob("lib/python*/site-packages"))


def _copy_kernels(packages: Path) -> None:
    """Copy the tests' kernels and the built-in model to where their wheel would install them."""
    package, extension = (importlib.util.find_spec(name) for name in ("ktqueue_kernels", "ktqueue_kernels._kernels"))
    assert package is not None and package.origin is not None
    assert extension is not None and extension.origin is not None, "the kernels are not compiled"
    shutil.copytree(Path(package.origin).parent, packages / "ktqueue_kernels", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy2(extension.origin, packages / "ktqueue_kernels")


def _closure(name: str) -> list[metadata.Distribution]:
    """Return the direct and transitive dependencies of a distribution without extras, except itself."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [Requirement(requirement) for requirement in metadata.requires(name) or []]
    while waiting:
        requirement = waiting.pop()
        extras = ("", *requirement.extras)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            distribution = metadata.distribution(requirement.name)
            asked = [Requirement(line) for line in distribution.requires or []]
            for child in asked:
                if child.name not in found and any(
                    child.marker is None or child.marker.evaluate({"extra": extra}) for extra in extras
                ):
                    child.marker = None
                    waiting.append(child)
            found[requirement.name] = distribution
    return list(found.values())


def _check(environment: Path, folder: Path, module: str) -> None:
    """Assert that a program of the environment imports the module from there, not from this tree."""
    command = [str(environment / "bin" / "python"), "-I", "-c", f"import {module} as found; print(found.__file__)"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found).is_relative_to(environment), f"not the wheel's: {found}"
