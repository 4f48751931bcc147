"""A digest is equal where tokens are, whatever files are called; and no file that is changed later is read again."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktqueue.core.errors import Unavailable
from ktqueue.loading import identity
from ktqueue.loading.identity import ModelFiles, digest_settings
from ktqueue.loading.load import load_model, prepare
from ktqueue.loading.model_path import resolve
from ktqueue.loading.plan import LoadPlan

RULES = Path(__file__).parents[2] / "rules"


def digest(model, tokenizer=None, **settings):
    with ModelFiles(str(model), tokenizer and str(tokenizer)) as files:
        return files.digest(settings)


def plan_of(path, rules, dtype=torch.float32):
    return prepare(str(path), rules=str(rules), device="cpu", dtype=dtype).plan


def settings_of(plan, dtype="float32", kv_cache_dtype="float32"):
    return digest_settings(plan, dtype=dtype, kv_cache_dtype=kv_cache_dtype)


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copy(resolve("demo"), tmp_path / "copy.gguf"))


def test_a_copy_under_another_name_is_the_same_model(copy):
    assert digest(copy) == digest("demo")
    assert len(digest(copy)) == 32


def test_one_bit_of_the_weights_makes_another_model(copy, monkeypatch):
    """Wherever it is, and though size and time of the file are as they were."""
    monkeypatch.setattr(identity, "PART_BYTES", 1 << 20)  # so that there are some, and a last one that is not full
    original, status = digest(copy), copy.stat()
    found = {original}
    for offset in (status.st_size // 2, status.st_size - 1, (1 << 20) - 1, 1 << 20):
        with copy.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        found.add(digest(copy))
    assert len(found) == 5


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_each_file_of_a_folder_counts(tiny, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    before = digest(folder)
    assert before == digest(tiny)
    (folder / "README.md").write_text("nobody loads this")
    assert digest(folder) == before
    path = folder / name
    path.write_text(path.read_text() + " " if path.exists() else "{{ messages }}")
    assert digest(folder) != before


def test_a_tokenizer_of_its_own_counts(copy, tiny):
    assert digest(copy) != digest(copy, tiny)


def test_settings_count_where_they_decide_tokens(tmp_path):
    default = plan_of("demo", RULES / "default.yaml")
    renamed = tmp_path / "mine.yaml"
    renamed.write_text("# mine\n" + (RULES / "default.yaml").read_text())
    assert settings_of(plan_of("demo", renamed)) == settings_of(default)
    others = [
        settings_of(plan_of("demo", RULES / "exact.yaml")),
        settings_of(default, dtype="bfloat16"),
        settings_of(default, kv_cache_dtype="fp8"),
        settings_of(LoadPlan(default.replacements, {"": "cuda:0"})),
    ]
    digests = {digest("demo", **one) for one in (settings_of(default), *others)}
    assert len(digests) == 5
    second = settings_of(replace(default, devices={"": "cuda:1"}))
    assert digest("demo", **second) in digests  # which of the GPUs it is does not


def test_a_file_that_changes_while_it_is_loaded_is_refused(copy):
    with ModelFiles(str(copy), None) as files, pytest.raises(Unavailable, match=r"copy.gguf.*changed while"):
        [part.result() for parts in files._parts for part in parts]
        with copy.open("r+b") as file:
            file.write(b"GGUF")
        files.digest({})


def test_a_file_that_is_cut_while_it_is_loaded_is_refused(copy):
    files = ModelFiles(str(copy), None)
    os.truncate(copy, 1000)
    with pytest.raises(Unavailable, match=r"copy.gguf.*truncated while"), files:
        files.digest({})


@pytest.mark.parametrize("rules", ["default", "exact", "modules"])
@pytest.mark.parametrize("stored", ["gguf", "folder"])
def test_no_file_is_mapped_once_a_model_is_loaded(tiny, copy, rules, stored):
    """Who reads a mapped file that was cut dies of SIGBUS; of one that was written over, it gets other weights."""
    path = copy if stored == "gguf" else tiny
    model = load_model(str(path), rules=str(RULES / f"{rules}.yaml"))
    mapped = Path("/proc/self/maps").read_text()
    assert str(path) not in mapped
    assert str(path.resolve()) not in mapped
    assert model.module is not None
