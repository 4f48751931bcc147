"""A digest is equal if tokens are equal, whatever the files are called. No file is read again after loading."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ktqueue.core.errors import Unavailable
from ktqueue.loading import identity
from ktqueue.loading.identity import ModelFiles, digest_settings
from ktqueue.loading.load import load_model, prepare
from ktqueue.loading.model_path import resolve
from ktqueue.loading.plan import LoadPlan
from ktqueue.operators.kv_cache import CacheScale

RULES = Path(__file__).parents[2] / "rules"


def digest(
    model: Path | str, tokenizer: Path | None = None, part_bytes: int = identity.PART_BYTES, **settings: Any
) -> str:
    with ModelFiles(str(model), str(tokenizer) if tokenizer else None, part_bytes) as files:
        return files.digest(settings)


def plan_of(rules: Path) -> LoadPlan:
    return prepare("demo", rules=str(rules), device="cpu", dtype=torch.float32).plan


def settings_of(plan: LoadPlan, dtype: str = "float32", kv_cache_dtype: str = "float32") -> dict[str, Any]:
    return digest_settings(plan, dtype=dtype, kv_cache_dtype=kv_cache_dtype)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the demo model's file."""
    return Path(shutil.copy(resolve("demo"), tmp_path / "copy.gguf"))


def test_a_copy_under_another_name_is_the_same_model(copy: Path) -> None:
    assert digest(copy) == digest("demo")
    assert len(digest(copy)) == 32


def test_one_bit_of_the_weights_makes_another_model(copy: Path) -> None:
    """This holds wherever the bit is, even if the size and time of the file are unchanged."""
    part_bytes = 1 << 20  # several parts, the last one shorter
    original, status = digest(copy, part_bytes=part_bytes), copy.stat()
    found = {original}
    for offset in (status.st_size // 2, status.st_size - 1, part_bytes - 1, part_bytes):
        with copy.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        found.add(digest(copy, part_bytes=part_bytes))
    assert len(found) == 5


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "hf_quant_config.json"]
)
def test_every_file_of_a_folder_changes_the_digest(tiny: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    before = digest(folder)
    assert before == digest(tiny)
    (folder / "README.md").write_text("this file is not loaded")
    assert digest(folder) == before
    path = folder / name
    path.write_text(path.read_text() + " " if path.exists() else "{{ messages }}")
    assert digest(folder) != before


def test_files_of_a_vocabulary_count_only_if_they_are_read(tiny: Path, tmp_path: Path) -> None:
    """The order is that of earlier releases: another one would strand started jobs."""
    for name in (
        "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
        "tiktoken.model", "tokenizer.model", "added_tokens.json",
    ):  # fmt: skip
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tiny / "model.safetensors")
    old = ["config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]

    def names() -> list[str]:
        return [path.name for path in identity._files(str(tmp_path))]

    assert names() == [old[0], "tokenizer.json", *old[1:], "tiktoken.model", "model.safetensors"]
    (tmp_path / "tokenizer.json").unlink()
    assert names() == [*old, "tiktoken.model", "added_tokens.json", "model.safetensors"]
    (tmp_path / "tiktoken.model").unlink()
    assert names() == [*old, "tokenizer.model", "added_tokens.json", "model.safetensors"]


def test_a_separate_tokenizer_changes_the_digest(copy: Path, tiny: Path) -> None:
    assert digest(copy) != digest(copy, tiny)


def test_settings_that_decide_tokens_change_the_digest(tmp_path: Path) -> None:
    default = plan_of(RULES / "default.yaml")
    renamed = tmp_path / "mine.yaml"
    renamed.write_text("# mine\n" + (RULES / "default.yaml").read_text())
    assert settings_of(plan_of(renamed)) == settings_of(default)
    others = [
        settings_of(plan_of(RULES / "exact.yaml")),
        settings_of(default, dtype="bfloat16"),
        settings_of(default, kv_cache_dtype="fp8"),
        settings_of(LoadPlan(default.replacements, {"": "cuda:0"})),
        digest_settings(default, dtype="float32", kv_cache_dtype="float32", original_length=4096),
        digest_settings(default, dtype="float32", kv_cache_dtype="fp8", cache_scales=[CacheScale(0.5, 2)]),
        digest_settings(default, dtype="float32", kv_cache_dtype="fp8", cache_scales=[CacheScale(2, 2)]),
    ]
    digests = {digest("demo", **settings) for settings in (settings_of(default), *others)}
    assert len(digests) == 8
    second = settings_of(replace(default, devices={"": "cuda:1"}))
    assert digest("demo", **second) in digests  # the number of the GPU does not count


def test_a_file_that_changes_while_it_is_loaded_is_refused(copy: Path) -> None:
    with ModelFiles(str(copy), None) as files, pytest.raises(Unavailable, match=r"copy.gguf.*changed while"):
        files.wait()
        with copy.open("r+b") as file:
            file.write(b"GGUF")
        files.digest({})


def test_a_file_that_is_truncated_while_it_is_loaded_is_refused(copy: Path) -> None:
    files = ModelFiles(str(copy), None)
    os.truncate(copy, 1000)
    with pytest.raises(Unavailable, match=r"copy.gguf.*truncated while"), files:
        files.digest({})


@pytest.mark.parametrize("rules", ["default", "exact", "modules"])
@pytest.mark.parametrize("stored", ["gguf", "folder"])
def test_no_file_is_mapped_once_a_model_is_loaded(
    tiny: Path, copy: Path, tmp_path: Path, rules: str, stored: str
) -> None:
    """Reading a mapped file that was truncated is a SIGBUS; one that was overwritten gives other weights."""
    path = copy if stored == "gguf" else shutil.copytree(tiny, tmp_path / "model")  # no other test has mapped it
    model = load_model(str(path), rules=str(RULES / f"{rules}.yaml"))
    mapped = Path("/proc/self/maps").read_text()
    assert str(path) not in mapped
    assert str(path.resolve()) not in mapped
    assert model.module is not None
