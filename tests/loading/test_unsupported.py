"""Families that are refused by name, before a weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from ktqueue.core.errors import CheckpointError
from ktqueue.families.table import FAMILIES, family_of_type
from ktqueue.families.unsupported import UNSUPPORTED
from ktqueue.loading.gguf.families import family_of_metadata
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.skeleton import build_config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "deepseek_v4"},
            "DeepSeek-V4 is not supported: it has attention to compressed keys, and experts that are chosen by token "
            "id (model_type 'deepseek_v4')",
        ),
        (
            {"model_type": "nemotron_h"},
            "Nemotron-H is not supported: it has layers that keep a state instead of keys and values (Mamba 2), and "
            "experts without a gate (model_type 'nemotron_h')",
        ),
        (
            {"model_type": "some_vl", "text_config": {"model_type": "kimi_linear"}},
            "Kimi-Linear is not supported: it has layers that keep a state instead of keys and values (Kimi delta "
            "attention) (model_type 'kimi_linear')",
        ),
        (
            {"model_type": "hy_v4", "quantization_config": {"quant_method": "fp8"}},
            "Hunyuan 4 is not supported: it has hyper-connections (model_type 'hy_v4')",
        ),
        (
            {"model_type": "bailing_moe"},  # transformers does not know the type
            "Ling 1 is not supported: it has an architecture that transformers does not have (model_type "
            "'bailing_moe')",
        ),
    ],
)
def test_a_folder_is_refused_by_its_config(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(CheckpointError) as caught:
        open_folder(tmp_path)
    assert str(caught.value) == f"{tmp_path}: {message}"
    with pytest.raises(CheckpointError) as caught:
        build_config(config, "model")
    assert str(caught.value) == f"model: {message}"


def test_a_model_is_refused_by_its_layers() -> None:
    """Some models of this type have no such layers. transformers calls layers of Mamba linear_attention too."""
    with pytest.raises(CheckpointError) as caught:
        build_config({"model_type": "granitemoehybrid"}, "model")
    words = "has layers that keep a state instead of keys and values, which is not supported"
    assert str(caught.value) == f"model: a granitemoehybrid {words}"


def test_a_file_is_refused_by_its_architecture() -> None:
    with pytest.raises(CheckpointError) as caught:
        family_of_metadata({"general.architecture": "lfm2moe"}, "file.gguf")
    part = "layers with a short convolution"
    assert str(caught.value) == f"file.gguf: LFM2 is not supported: it has {part} (GGUF architecture 'lfm2moe')"


def test_no_family_is_both_supported_and_refused() -> None:
    model_types = [model_type for family in UNSUPPORTED for model_type in family.model_types]
    architectures = [architecture for family in UNSUPPORTED for architecture in family.architectures]
    assert len({*model_types}) == len(model_types) and len({*architectures}) == len(architectures)
    assert not any(family_of_type(model_type).model_type for model_type in model_types)
    assert not {*architectures} & {family.gguf.architecture for family in FAMILIES if family.gguf}
    assert all(family.model_types or family.architectures for family in UNSUPPORTED)
