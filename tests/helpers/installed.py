"""ktqueue as a user has it: the wheel of this tree in a virtual environment of its own, not the source folder."""

import fcntl
import importlib.util
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this tree into `folder`; the compiled kernels are those that the tests use."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--config-settings=wheel.cmake=false"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("ktqueue-*.whl")
    return wheel


def installed_bin(folder: Path) -> Path:
    """The folder with `ktqueue` and `python` of an environment where the wheel is installed.

    The environment is made once in `folder` (an absolute path, best one for all processes of a test run); other
    processes wait for it. Dependencies are borrowed from the environment that runs the tests. Programs there do not
    import from this tree: a line of a .pth file adds a folder to the path, but no .pth file of that folder is read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = folder / "environment"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(environment, ignore_errors=True)
            venv.create(environment, symlinks=True)
            python = environment / "bin" / "python"
            wheel = build_wheel(folder)
            command = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", "--no-deps"]
            subprocess.run([*command, "--no-compile", str(wheel)], check=True)
            site_packages = next(environment.glob("lib/python*/site-packages"))
            borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
            (site_packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
            kernels = importlib.util.find_spec("ktqueue._kernels")
            assert kernels is not None and kernels.origin is not None, "the kernels are not compiled"
            shutil.copy2(kernels.origin, site_packages / "ktqueue")
            command = [str(python), "-P", "-c", "import ktqueue.operators.native as found; print(found.__file__)"]
            found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            assert Path(found).is_relative_to(environment), f"not the wheel's: {found}"
            (folder / "complete").touch()
    return environment / "bin"
