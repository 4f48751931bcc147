"""Pinned versions, promises of the README, contents of the images, and the length of files."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LONGEST_FILE = 400  # lines
TEXT = {".py", ".cpp", ".h", ".lua", ".md", ".yaml", ".toml"}


def tracked() -> list[Path]:
    """Files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def project(folder: str = ".") -> dict[str, Any]:
    """pyproject.toml of a distribution: the root has ktqueue, csrc has ktqueue-kernels."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    """The exact version of each package in constraints.txt."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text:
            name, separator, version = text.partition("==")
            assert separator, f"not an exact version: {line}"
            assert canonicalize_name(name) not in found, f"pinned twice: {name}"
            found[canonicalize_name(name)] = version
    return found


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_dependency_is_pinned_within_its_bounds() -> None:
    exact = pins()
    book = project()["project"]
    asked = [
        *book["dependencies"],
        *(requirement for extra in book["optional-dependencies"].values() for requirement in extra),
    ]
    asked += [*project()["build-system"]["requires"], *project("csrc")["build-system"]["requires"]]
    for requirement in map(Requirement, asked):
        if requirement.name == project("csrc")["project"]["name"]:
            continue  # our own distribution
        name = canonicalize_name(requirement.name)
        assert name in exact, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(exact[name]), f"{requirement} does not allow the pinned {exact[name]}"


def test_the_pythons_are_the_same_everywhere() -> None:
    from ktqueue.cli.doctor import PYTHONS
    from release.wheels import PYTHONS as TRIED

    named = [f"3.{minor}" for minor in PYTHONS]
    assert list(TRIED) == named
    for folder in (".", "csrc"):
        book = project(folder)["project"]
        assert book["requires-python"] == f">={named[0]},<3.{PYTHONS[-1] + 1}"
        of_python = "Programming Language :: Python :: "
        assert [
            classifier.removeprefix(of_python) for classifier in book["classifiers"] if classifier.startswith(of_python)
        ] == named
    makefile = (ROOT / "Makefile").read_text()
    assert f"(3, {PYTHONS[0]}) <= sys.version_info[:2] <= (3, {PYTHONS[-1]})" in makefile
    for names in re.findall(r"for name in (python3[^;]*);", makefile):
        assert names.split() == [*(f"python{version}" for version in named), "python3"]
    listed = f"{', '.join(named[:-1])} or {named[-1]}"
    assert f"No Python {listed} with venv is on PATH" in makefile
    assert f"On Linux with Python {listed}" in (ROOT / "README.md").read_text()
    assert f"for Python {named[0]} to {named[-1]} on Linux" in (ROOT / "constraints.txt").read_text()


def test_modules_that_need_no_extra_import_none() -> None:
    book = project()["project"]
    extras = {
        name: book["optional-dependencies"][name] for name in ("gateway", "worker", "embedded", "arq", "gpu", "s3")
    }
    optional = {Requirement(requirement).name for extra in extras.values() for requirement in extra}
    optional -= {Requirement(requirement).name for requirement in book["dependencies"]}
    called = {"pyyaml": "yaml", "flashinfer-python": "flashinfer"}
    assert "ktqueue-kernels" in optional
    modules = {called.get(name, name.replace("-", "_")) for name in optional}
    verbs = ("batch.session", "jobs", "submit", "top")
    imports = ["import sys", "sys.modules.update(dict.fromkeys(sys.argv[1:]))", "import ktqueue.client"]
    code = "\n".join([*imports, "import ktqueue.batches.run", *(f"import ktqueue.cli.{verb}" for verb in verbs)])
    subprocess.run([sys.executable, "-c", code, *sorted(modules)], cwd=ROOT, check=True)


def test_no_pin_names_a_local_build() -> None:
    assert [f"{name}=={version}" for name, version in pins().items() if "+" in version] == []


def test_make_targets_named_in_the_documents_exist() -> None:
    targets = makefile_targets()
    assert {"demo", "test", "lint", "type", "bench", "size", "clean", "help"} <= targets
    for page in [path for path in tracked() if path.suffix == ".md"]:
        for line in re.findall(r"(?:^ {4}|`)make ([a-z]+(?: [a-z]+)*)", page.read_text(), re.MULTILINE):
            for target in line.split():
                assert target in targets, f"{page.relative_to(ROOT)} says make {target}"


def test_ci_runs_the_readme_s_checks() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    for command in ("make lint", "make type", "make test", "make long"):
        assert re.search(rf"^{command}$", script, re.MULTILINE), f".ci/run does not run {command}"
    assert "make test" in (ROOT / "README.md").read_text()


def test_links_between_documents_have_targets() -> None:
    for page in [path for path in tracked() if path.suffix == ".md"]:
        for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            if "://" not in target:
                linked = page.parent / target if target else page
                assert linked.exists(), f"{page.relative_to(ROOT)} links to {target}"
                assert not heading or heading in anchors(linked), (
                    f"{page.relative_to(ROOT)} links to {target}#{heading}"
                )


def anchors(page: Path) -> set[str]:
    """The anchors that a forge gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked()
        if path.suffix in TEXT and (lines := len(path.read_text().splitlines())) > LONGEST_FILE
    }
    assert long == {}


def test_the_version_is_stated_once() -> None:
    import ktqueue_kernels

    from ktqueue import __version__

    assert project()["project"]["version"] == project("csrc")["project"]["version"] == __version__
    assert ktqueue_kernels.__version__ == __version__
    assert f"ktqueue-kernels=={__version__}" in project()["project"]["optional-dependencies"]["worker"]
    assert f"[{__version__}]" in (changelog := (ROOT / "CHANGELOG.md").read_text()) or "[Unreleased]" in changelog


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_images_install_from_constraints_and_run_as_nobody(name: str) -> None:
    lines = (ROOT / "docker" / f"{name}.Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    assert "PIP_CONSTRAINT=/source/constraints.txt" in text
    for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert re.search(r":\d+\.\d+\.\d+", image), f"{image} has no exact version"
    last_stage = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*:", last_stage, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", last_stage, re.MULTILINE)
    for source in re.findall(r"^COPY (?!--from)(\S+) /", text, re.MULTILINE):
        assert (ROOT / source).exists(), source
    assert ("torch" in text) == (name == "worker")
    assert ("./csrc '.[" in text) == (name == "worker")
    assert ("slim" in text.partition("\n")[0]) == (name == "gateway"), "only the kernels need a compiler"
    installed = re.search(r"'\.\[([a-z0-9,]+)\]'", text)
    assert installed is not None
    assert set(installed[1].split(",")) <= set(project()["project"]["optional-dependencies"])


def test_compose_scales_workers_and_pins_its_images() -> None:
    book = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    services = book["services"]
    assert set(services) == {"redis", "gateway", "control", "worker"}
    assert "container_name" not in services["worker"], "a named container cannot be scaled"
    assert "ports" not in services["worker"], "a published port cannot be scaled"
    for name, service in services.items():
        assert re.search(r":\d+\.\d+\.\d+", service["image"]), f"{name} has no exact version"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        if "build" in service:
            assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert "noeviction" in services["redis"]["command"]


def test_compose_settings_are_known() -> None:
    from ktqueue.core.config import load_config

    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for service in services.values():
        given = {key: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text) for key, text in service.get("environment", {}).items()}
        config = load_config(environment=given)
        assert config.gateway.api_keys == ()
