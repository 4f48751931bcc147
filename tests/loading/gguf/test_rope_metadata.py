"""Parameters of yarn go to GGUF and back. Values that one side cannot express are refused by name, in every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.gguf.header import ModelMetadata
from ktqueue.loading.gguf.rope import rope_from_metadata, rope_to_metadata
from ktqueue.loading.load import load_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16}


def written(rope: dict[str, Any], *, latent: bool) -> dict[str, Any]:
    config = {"max_position_embeddings": 256, "rope_parameters": rope}
    return rope_to_metadata("x", config, "folder", latent=latent, factors=False)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_betas_survive_a_round_trip(
    model_type: str,
    make_model: Callable[..., Path],
    make_gguf: Callable[..., Path],
    assert_equals_transformers: Callable[..., None],
) -> None:
    """Frequencies with that many periods are scaled differently than with the defaults."""
    rope = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.0, "mscale_all_dim": 0.0}
    path = make_gguf(model_type=model_type, rope_parameters=rope)
    assert_equals_transformers(load_model(str(path)), make_model(model_type, rope_parameters=rope))


@pytest.mark.parametrize("latent", [False, True])
def test_missing_betas_have_the_defaults_of_transformers(latent: bool) -> None:
    metadata = written(YARN, latent=latent)
    for stated in (metadata, {key: value for key, value in metadata.items() if "beta" not in key}):
        found = rope_from_metadata(ModelMetadata("x", stated, "file"), latent=latent)
        assert found == {**YARN, "beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize(
    ("changes", "latent", "message"),
    [
        ({"attention_factor": 1.7}, False, "folder: rope attention_factor cannot be written"),
        ({"attention_factor": 1.7}, True, "folder: rope attention_factor cannot be written"),
        ({"truncate": False}, False, "folder: rope truncate False cannot be written"),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, False, "mscale 1.0, mscale_all_dim 1.0 cannot be written"),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, True, "mscale 1.0 and mscale_all_dim 0.5 differ"),
    ],
)
def test_parameters_that_gguf_cannot_express_are_refused(changes: dict[str, Any], latent: bool, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        written({**YARN, **changes}, latent=latent)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(
    ("kind", "key", "value", "refused"),
    [
        ("yarn", "attn_factor", 0.5, True),
        ("none", "attn_factor", 0.5, True),
        ("yarn", "yarn_attn_factor", 2.0, True),
        ("yarn", "yarn_attn_factor", 1.0, False),
        ("yarn", "yarn_ext_factor", 0.0, True),
        ("yarn", "yarn_ext_factor", -1.0, False),
        ("linear", "yarn_ext_factor", 1.0, True),
        ("linear", "yarn_ext_factor", 0.0, False),
        ("none", "yarn_ext_factor", 0.0, False),
        ("none", "yarn_ext_factor", 1.0, False),
    ],
)
def test_attention_factors_of_a_file_are_refused_or_have_no_effect(
    kind: str, key: str, value: float, refused: bool, latent: bool
) -> None:
    """Such factors scale scores or mix frequencies, which is not implemented."""
    plain = written({**YARN, "rope_type": kind.replace("none", "default")}, latent=latent)
    metadata = {**plain, f"x.rope.scaling.{key}": value}
    if refused:
        with pytest.raises(CheckpointError, match=f"file: metadata key x.rope.scaling.{key} {value} is not supported"):
            rope_from_metadata(ModelMetadata("x", metadata, "file"), latent=latent)
    else:
        found = rope_from_metadata(ModelMetadata("x", metadata, "file"), latent=latent)
        assert found == rope_from_metadata(ModelMetadata("x", plain, "file"), latent=latent)


@pytest.mark.parametrize(("factor", "kind"), [(4.0, "linear"), (1.0, "default"), (0.0, "default")])
def test_a_factor_without_a_type_is_linear(factor: float, kind: str) -> None:
    metadata = ModelMetadata("x", {"x.rope.scaling.factor": factor}, "file")
    assert rope_from_metadata(metadata, latent=False)["rope_type"] == kind
