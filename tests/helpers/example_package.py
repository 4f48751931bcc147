"""The example package of operators, installed with pip into a folder of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "loading" / "injection" / "example"
RULES = """
base: modules
options:
  CpuExperts: {activations: float32}
  CpuLinear: {activations: float32}
rules:
- match: {class: 'RMSNorm$'}
  replace:
    op: DoubleNorm
- match: {name: '\\.experts$'}
  replace:
    class: exact_operators:TorchExperts
    device: cpu
"""
"""Both operators of the package, one by its short name and one by its path."""


def install_example(folder: Path) -> Path:
    """Install the package into `folder`/packages, without network, and return that folder."""
    shutil.copytree(SOURCE, folder / "source")
    target = folder / "packages"
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target
