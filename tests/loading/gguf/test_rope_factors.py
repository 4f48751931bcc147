"""Rotary factors in GGUF: those of Llama 3.1 from parameters to a tensor, and back, and the two lists of longrope."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rope_parameters import LLAMA3_ROPE

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.header import read_header
from ktqueue.loading.gguf.rope import FACTORS_TENSOR, llama3_factors
from ktqueue.loading.gguf.writer import GgufWriter
from ktqueue.loading.load import load_model
from ktqueue.loading.rules import DEFAULT_RULES
from ktqueue.operators.rotary import rotary_tables

IDS = list(range(3, 103))
LISTS = {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}
MSCALES = {"short_mscale": 1.3, "long_mscale": 1.3}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}


@pytest.fixture
def rules(tmp_path: Path) -> str:
    """Rules that leave a model as it is."""
    path = tmp_path / "none.yaml"
    path.write_text("- match: {name: '^model$'}\n  replace: {op: default}\n")
    return str(path)


@pytest.fixture
def model_file(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A small Llama of that kind as float32 GGUF."""
    path = tmp_path / "model.gguf"
    convert(make_model("llama", rope_parameters=LLAMA3_ROPE), path, experts="f32", dense="f32")
    return path


def _overwrite(path: Path, factors: list[float]) -> None:
    """Replace the factors in the file's tensor."""
    (info,) = [tensor for tensor in read_header(path).tensors if tensor.name == FACTORS_TENSOR]
    data = np.array(factors, "<f4").tobytes()
    raw = path.read_bytes()
    path.write_bytes(raw[: info.offset] + data + raw[info.offset + len(data) :])


@pytest.mark.parametrize("operator", ["none", "CpuDecoder"])
def test_logits_equal_transformers(
    operator: str,
    model_file: Path,
    rules: str,
    make_model: Callable[..., Path],
    reference_logits: Callable[..., torch.Tensor],
    run_logits: Callable[..., torch.Tensor],
) -> None:
    expected = reference_logits(make_model("llama", rope_parameters=LLAMA3_ROPE), IDS)
    if operator == "CpuDecoder":
        rules = str(DEFAULT_RULES.with_name("exact.yaml"))
    model = load_model(str(model_file), rules=rules)
    assert (type(model.module).__name__ == "CpuDecoder") == (operator == "CpuDecoder")
    torch.testing.assert_close(run_logits(model.module, model.kv_layout(16), IDS), expected, atol=2e-4, rtol=2e-4)
    _overwrite(model_file, [1.0] * 8)
    plain = load_model(str(model_file), rules=rules)
    assert (run_logits(plain.module, plain.kv_layout(16), IDS) - expected).abs().max() > 0.1


def test_factors_range_from_one_to_the_scaling_factor() -> None:
    """head_dim 16, theta 10,000: frequencies have 10.2, 3.2, 1.02 and fewer periods in 64 positions.

    Those with 4 or more are kept, those with 1 or fewer are divided by the whole factor.
    """
    got = llama3_factors(LLAMA3_ROPE, 16, "here")
    periods = 64 / (2 * np.pi) * 10.0 ** (-np.arange(8) / 2)
    kept = (periods[1:3] - 1) / 3
    np.testing.assert_allclose(got[1:3], 1 / ((1 - kept) / 8 + kept), rtol=1e-6)
    assert got[0] == 1 and (got[3:] == 8).all()
    equal = llama3_factors({**LLAMA3_ROPE, "low_freq_factor": 4.0}, 16, "here")  # as Llama 4 has them
    assert equal[0] == 1 and (equal[1:] == 8).all()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_damaged_factors_are_refused(value: float, model_file: Path, rules: str) -> None:
    _overwrite(model_file, [1.0] * 7 + [value])
    with pytest.raises(CheckpointError, match=r"model.gguf: tensor 'rope_freqs.weight' must hold 8 positive numbers"):
        load_model(str(model_file), rules=rules)


def test_factors_with_another_scaling_are_refused(model_file: Path, rules: str, tmp_path: Path) -> None:
    header, target = read_header(model_file), tmp_path / "both.gguf"
    kept = {key: value for key, value in header.metadata.items() if not key.startswith("general.")}
    with GgufWriter(target, "llama", "F32") as writer:
        writer.add_metadata({**kept, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
        for info in header.tensors:
            writer.add_tensor(info.name, "F32", info.shape)
        writer.start()
        for info in header.tensors:
            writer.write(header.data[info.offset : info.offset + 4 * int(np.prod(info.shape))])
    with pytest.raises(CheckpointError, match=r"'rope_freqs.weight' and rope.scaling.type 'linear' cannot be combined"):
        load_model(str(target), rules=rules)


@pytest.mark.parametrize("change", [{"factor": None}, {"factor": 0}, {"low_freq_factor": 4.1}])
def test_unusable_llama3_parameters_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="here: rope_type llama3"):
        llama3_factors({**LLAMA3_ROPE, **change}, 16, "here")
    with pytest.raises(CheckpointError, match="low_freq_factor"):
        llama3_factors({key: value for key, value in LLAMA3_ROPE.items() if key != "low_freq_factor"}, 16, "here")


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("phi3", {"rope_parameters": {**LONGROPE, **LISTS, "partial_rotary_factor": 0.75}, "sliding_window": 200}),
        ("phi3", {"rope_scaling": {**LISTS, "type": "longrope"}, "partial_rotary_factor": 0.75}),
        ("phimoe", {"rope_parameters": {**LONGROPE, **{name: [3.0, *LISTS[name], 9.0] for name in LISTS}, **MSCALES}}),
    ],
)
def test_longrope_has_the_same_angles_in_a_file(
    model_type: str, changes: dict[str, Any], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder, path = make_model(model_type, **changes), tmp_path / "model.gguf"
    convert(folder, path, experts="f32", dense="f32")
    models = [load_model(str(file)) for file in (folder, path)]
    kept = ("sliding_window", "max_position_embeddings", "attention_bias", "lm_head_bias", "tie_word_embeddings")
    assert len({str([getattr(model.config, name, None) for name in kept]) for model in models}) == 1
    assert {model.kv_layout(16).original_length for model in models} == {16}
    tables = [rotary_tables(model.module.get_submodule("rotary"), 100) for model in models]
    for ours, theirs in zip(*tables, strict=True):
        assert torch.equal(ours, theirs) and len(ours[0]) == 116
        assert not torch.equal(ours[0, 1:16], ours[0, 17:32])


def test_a_list_without_the_other_is_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    rope = {**LONGROPE, **LISTS, "partial_rotary_factor": 0.75}
    convert(make_model("phi3", rope_parameters=rope), path := tmp_path / "model.gguf", experts="f32", dense="f32")
    path.write_bytes(path.read_bytes().replace(b"rope_factors_short.weight", b"rope_factors_other.weight"))
    with pytest.raises(CheckpointError, match=r"tensor 'rope_factors_short.weight' is missing"):
        load_model(str(path))


def test_scales_that_differ_are_not_written(make_model: Callable[..., Path], tmp_path: Path) -> None:
    lists = {name: [1.0, *LISTS[name], 9.0] for name in LISTS}
    folder = make_model("phimoe", rope_parameters={**LONGROPE, **lists, "short_mscale": 1.1, "long_mscale": 1.2})
    with pytest.raises(CheckpointError, match=r"short_mscale 1\.1 and long_mscale 1\.2 must be equal"):
        convert(folder, tmp_path / "model.gguf", experts="f32")
