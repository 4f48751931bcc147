"""The contents of wheels and source distributions. The tree and the sources give the same wheel."""

import shutil
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
from installed import ROOT, build_wheel
from packaging.requirements import Requirement

from ktqueue import __version__

pytestmark = pytest.mark.installed

SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"


def build_sdist(source: Path, folder: Path) -> Path:
    subprocess.run([sys.executable, "-c", SDIST, str(folder)], cwd=source, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def contents(wheel: Path) -> dict[str, bytes]:
    """The content of each file by name, without the file of the wheel's hashes."""
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def test_ktqueue_is_one_pure_package(wheel: Path) -> None:
    assert wheel.name == f"ktqueue-{__version__}-py3-none-any.whl"
    files = contents(wheel)
    assert max(map(len, files.values())) < 1 << 16  # sources alone: a model or a compiled file is far larger
    names = files.keys()
    assert {name.partition("/")[0] for name in names} == {"ktqueue", f"ktqueue-{__version__}.dist-info"}
    assert {name for name in names if name.endswith((".so", ".gguf", ".cpp"))} == set()


def test_every_source_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "ktqueue", "workers", "rules"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = {name if name.startswith("ktqueue/") else f"ktqueue/{name}" for name in tracked if (ROOT / name).is_file()}
    wanted = {name for name in files if not name.endswith(".gguf")}
    assert "ktqueue/workers/generation/worker_process.py" in wanted and "ktqueue/rules/exact.yaml" in wanted
    assert wanted - contents(wheel).keys() == set()


def test_the_worker_extra_requires_kernels_of_the_same_version(wheel: Path) -> None:
    metadata = contents(wheel)[f"ktqueue-{__version__}.dist-info/METADATA"]
    asked = map(Requirement, message_from_bytes(metadata).get_all("Requires-Dist", []))
    (kernels,) = [requirement for requirement in asked if requirement.name == "ktqueue-kernels"]
    assert str(kernels.specifier) == f"=={__version__}"
    assert str(kernels.marker) == 'extra == "worker"'


def test_the_sources_of_ktqueue_make_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build_sdist(ROOT, tmp_path / "sdist")
    with tarfile.open(archive) as sources:
        parts = [Path(name).parts for name in sources.getnames()]
    assert {part[1] for part in parts} == {"ktqueue", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
    assert contents(build_wheel(archive, tmp_path / "wheel")) == contents(wheel)


def test_the_build_context_of_docker_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    for name in (line[1:] for line in lines if line.startswith("!")):
        source, target = ROOT / name, context / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy2(source, target)
    assert contents(build_wheel(context, tmp_path / "wheel")) == contents(wheel)
    assert (context / "csrc" / "ktqueue_kernels" / "tale-teller-q4_0.gguf").is_file()
    assert (context / "csrc" / "LICENSE").is_file()


def test_the_sources_of_the_kernels_are_complete(tmp_path: Path) -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listed, cwd=ROOT / "csrc", capture_output=True, text=True, check=True).stdout.splitlines()
    with tarfile.open(build_sdist(ROOT / "csrc", tmp_path)) as sources:
        assert all(member.isfile() for member in sources.getmembers()), "a link points outside of the sources"
        names = {"/".join(Path(name).parts[1:]) for name in sources.getnames()}
        assert names - {"PKG-INFO"} == {name for name in tracked if (ROOT / "csrc" / name).exists()}
        model = sources.extractfile(f"ktqueue_kernels-{__version__}/ktqueue_kernels/tale-teller-q4_0.gguf")
        assert model is not None and model.read(4) == b"GGUF"


def test_the_wheel_of_the_kernels_is_one_package_with_the_model(tmp_path: Path) -> None:
    names = contents(build_wheel(ROOT / "csrc", tmp_path)).keys()
    assert {name.partition("/")[0] for name in names} == {"ktqueue_kernels", f"ktqueue_kernels-{__version__}.dist-info"}
    assert [name for name in names if name.endswith(".gguf")] == ["ktqueue_kernels/tale-teller-q4_0.gguf"]
    assert len([name for name in names if name.endswith(".so")]) == 1


def test_kernels_of_another_version_are_refused() -> None:
    code = "import ktqueue_kernels; ktqueue_kernels.__version__ = '9.9'; import ktqueue.operators.native"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    wanted = f"ktqueue {__version__} needs ktqueue-kernels {__version__}, but 9.9 is installed"
    assert wanted in done.stderr.splitlines()[-1]
