"""Two tensors that are one according to the config, in a file that has both: the file has precedence, as in
transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ktqueue.loading.convert import convert
from ktqueue.loading.load import load_model
from ktqueue.loading.model_report import report_model
from ktqueue.loading.rules import DEFAULT_RULES

EXACT = str(DEFAULT_RULES.with_name("exact.yaml"))
EMBEDDINGS = {"gpt2": "transformer.wte.weight"}


@pytest.fixture
def with_head(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """with_head(model_type, separate, dtype) -> a folder with tied embeddings in its config and a head in its file.

    The head has other numbers if `separate`, else it is a copy.
    """

    def make(model_type: str, separate: bool, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        source = make_model(model_type, tie_word_embeddings=True, **changes)
        weights = safetensors.torch.load_file(source / "model.safetensors")
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
        embedding = weights[EMBEDDINGS.get(model_type, "model.embed_tokens.weight")]
        weights["lm_head.weight"] = (embedding.flip(0) if separate else embedding).float().clone()
        (folder := tmp_path / "model").mkdir()
        safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((source / name).read_bytes())
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
        return folder

    return make


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "granitemoe", "gpt2"])
def test_a_separate_head_is_used(
    model_type: str, separate: bool, with_head: Callable[..., Path], assert_equals_transformers: Callable[..., None]
) -> None:
    folder = with_head(model_type, separate, **({"num_key_value_heads": 4} if model_type == "gpt2" else {}))
    (head,) = [row for row in report_model(str(folder)).rows if row.name == "lm_head"]
    assert bool(head.file_bytes) is separate
    assert_equals_transformers(load_model(str(folder), rules=EXACT), folder)


def test_a_copy_in_another_type_is_a_copy(with_head: Callable[..., Path]) -> None:
    report = report_model(str(with_head("llama", separate=False, dtype=torch.bfloat16)))
    assert [row.file_bytes for row in report.rows if row.name == "lm_head"] == [0]


@pytest.mark.parametrize("separate", [True, False])
def test_a_converted_model_has_the_head_that_its_folder_has(
    separate: bool, with_head: Callable[..., Path], assert_equals_transformers: Callable[..., None], tmp_path: Path
) -> None:
    folder = with_head("qwen3_moe", separate)
    convert(folder, tmp_path / "model.gguf", experts="f32", dense="f32")
    model = load_model(str(tmp_path / "model.gguf"), rules=EXACT)
    assert model.config.tie_word_embeddings is not separate
    assert_equals_transformers(model, folder)
