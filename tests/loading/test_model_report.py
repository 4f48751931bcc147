"""The report of inspect: every byte of the file is in a row, and devices follow the plan."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError, KtqueueError
from ktqueue.loading.gguf.checkpoint import read_parts
from ktqueue.loading.gguf.library import type_name
from ktqueue.loading.gguf.writer import GgufWriter
from ktqueue.loading.load import load_model
from ktqueue.loading.model_report import report_model
from ktqueue.loading.weight_formats import tensor_bytes
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.workers.startup.build import build


def demo_with(quants: dict[str, str], path: Path) -> str:
    """Write the demo model with some of its tensors in other types. These tensors have only zeros."""
    (header,) = read_parts(Path(report_model("demo").source))
    left_out = {"general.architecture", "general.file_type", "general.quantization_version"}  # the writer adds these
    contents = []
    with GgufWriter(path, header.metadata["general.architecture"], "F32") as writer:
        writer.add_metadata({key: value for key, value in header.metadata.items() if key not in left_out})
        for info in header.tensors:
            quant = quants.get(info.name, type_name(info.type_id))
            size = tensor_bytes(quant, info.shape)
            stored = header.data[info.offset : info.offset + size]
            contents.append(np.zeros(size, np.uint8) if info.name in quants else stored)
            writer.add_tensor(info.name, quant, info.shape)
        writer.start()
        for data in contents:
            writer.write(data)
    return str(path)


def test_the_report_has_all_of_the_demo_model() -> None:
    report = report_model("demo")
    assert (report.layers, report.facts.quantization) == (8, "Q4_0")
    assert 29_900_000 < report.parameters < 29_950_000
    assert {row.operator for row in report.rows} == {"CpuDecoder"}
    (experts,) = [row for row in report.rows if row.name.endswith("experts")]
    assert (experts.name, experts.count, experts.quants) == ("model.layers.*.mlp.experts", 8, ("Q4_0",))
    assert experts.file_bytes == experts.device_bytes == 8 * 16 * 3 * 256 * 256 * 18 // 32
    (embedding,) = [row for row in report.rows if row.name == "model.embed_tokens"]
    assert embedding.device_bytes == embedding.file_bytes == 8192 * 256 * 34 // 32 and embedding.quants == ("Q8_0",)
    (head,) = [row for row in report.rows if row.name == "lm_head"]
    assert (head.file_bytes, head.device_bytes) == (0, embedding.file_bytes)
    decoder = load_model("demo").module
    assert isinstance(decoder, CpuDecoder)
    norms = sum(row.device_bytes for row in report.rows if "norm" in row.name)
    assert report.device_bytes["cpu"] == decoder.device_bytes()["cpu"] + norms
    size = Path(report.source).stat().st_size
    assert 0.97 * size < sum(row.file_bytes for row in report.rows) < size
    assert report.device_bytes == {"cpu": sum(row.device_bytes for row in report.rows)}


@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral"])
def test_every_tensor_is_in_a_row(model_type: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- match: {name: 'layers.1.mlp.experts$'}\n  replace: {op: CpuExperts, device: cpu}\n"
        "- match: {name: 'layers.0$'}\n  replace: {op: default, device: 'cuda:1'}\n"
    )
    report = report_model(str(make_model(model_type)), rules=str(rules), device="cuda")
    assert sum(row.file_bytes for row in report.rows) == 4 * report.parameters
    assert set(report.device_bytes) == {"cpu", "cuda", "cuda:1"}
    operators = {(row.operator, row.device) for row in report.rows if row.name.endswith("experts")}
    assert operators == {("CpuExperts", "cpu"), ("default", "cuda:1")}


def test_a_fused_product_with_a_float_part_is_reported_as_decoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The report says that q, k and v are decoded. The warning names the float part."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, dense: quantised}\n")
    path = demo_with({"blk.3.attn_v.weight": "F32"}, tmp_path / "mixed.gguf")
    decoder = load_model(path, rules=str(rules)).module
    assert isinstance(decoder, GpuDecoder)
    buffer = 4 * 8192 * 256  # of decoded weights
    assert (
        sum(decoder.device_bytes().values()) == sum(report_model(path, rules=str(rules)).device_bytes.values()) + buffer
    )
    decoder.close()
    assert "dense matrices in F32 are decoded" in caplog.text


def test_values_that_are_padded_to_the_width_of_keys_are_reported_so(make_model: Callable[..., Path]) -> None:
    report = report_model(str(make_model("mimo_v2_flash", head_dim=32)))
    keys, values = (next(row for row in report.rows if row.name.endswith(f".{part}_proj")) for part in "kv")
    assert (values.file_bytes, values.device_bytes) == (keys.file_bytes // 2, keys.device_bytes)


def test_requantised_embeddings_are_reported_in_their_loaded_format(tmp_path: Path) -> None:
    path = demo_with({"token_embd.weight": "Q5_0"}, tmp_path / "q5_0.gguf")
    (embedding,) = [row for row in report_model(path).rows if row.name == "model.embed_tokens"]
    assert embedding.file_bytes == 8192 * 256 * 22 // 32
    assert embedding.device_bytes == 8192 * 256 * 34 // 32


Damage = Callable[[Path], None]


def config_with(**values: object) -> Damage:
    """Change keys of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def rewritten(name: str, content: bytes) -> Damage:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def both_refusals(path: str, rules: str | None = None) -> tuple[str, str]:
    """Return why a worker does not start and why inspect refuses. Neither reads weights."""
    read_tensors: list[str] = []
    with pytest.raises(KtqueueError) as loading:
        build(EngineConfig(model=path, rules=rules), progress=lambda *_: read_tensors.append("read"))
    assert read_tensors == []
    try:
        refusal = report_model(path, rules=rules).refusal
    except KtqueueError as error:
        refusal = error.message
    assert refusal is not None
    return loading.value.message, refusal


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (rewritten("tokenizer.json", b'{"model": {}}'), "not a tokenizer file"),
        (rewritten("tokenizer_config.json", b"{"), "tokenizer_config.json"),
        (without("model.safetensors"), "model.safetensors"),
        (rewritten("model.safetensors", b"\x08\0\0"), "truncated or corrupt"),
        (config_with(model_type="fox"), "model_type 'fox' is unknown"),
        (config_with(num_hidden_layers=3), "num_hidden_layers is 3"),
        (config_with(quantization_config={"quant_method": "awq", "bits": 3}), "quantised with AWQ in 3 bits"),
        (config_with(quantization_config={"quant_method": "gptq", "bits": 2}), "quantised with GPTQ in 2 bits"),
        (config_with(quantization_config={"quant_method": "hqq"}), "quantised with HQQ, which is not supported"),
        (config_with(quantization_config={"load_in_4bit": True}), "quantised with bitsandbytes in 4 bits"),
        (config_with(quantization_config={"quant_method": "mxfp4"}), "quantised with MXFP4"),
        (config_with(text_config={"quantization_config": {"quant_algo": "NVFP4"}}), "quantised with NVFP4"),
        (config_with(compression_config={"quant_method": "compressed-tensors"}), "compressed-tensors"),
    ],
)
def test_a_folder_is_refused_as_loading_refuses_it(damage: Damage, words: str, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    damage(folder)
    loading, looking = both_refusals(str(folder))
    assert loading == looking and words in looking


def test_a_folder_without_a_tokenizer_is_refused_before_its_weights(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    (folder / "tokenizer.json").unlink()
    loading, looking = both_refusals(str(folder))
    assert loading == looking and "--tokenizer" in looking
    assert report_model(str(folder), tokenizer=str(tiny)).refusal is None


def test_a_model_without_a_longest_context_is_refused(make_model: Callable[..., Path]) -> None:
    """BLOOM adds to scores what depends on the distance, so its config has no number of positions."""
    with pytest.raises(CheckpointError, match="the config of a bloom states no max_position_embeddings"):
        report_model(str(make_model("bloom", max_position_embeddings=None)))


def test_rules_that_spread_a_step_are_refused(tiny: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {name: 'layers.1$'}\n  replace: {op: default, device: cuda}\n")
    loading, looking = both_refusals(str(tiny), str(rules))
    assert loading == looking and "only CpuExperts, and operators with any_device, can be on another device" in looking


def test_a_quantised_folder_is_named_by_its_method_not_by_its_types(tiny: Path, tmp_path: Path) -> None:
    """No kernel has the types of its tensors, but an error about types would not help the user."""
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    config_with(quantization_config={"quant_method": "hqq"})(folder)
    safetensors.torch.save_file({"model.layers.0.x": torch.zeros(4, dtype=torch.int32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        report_model(str(folder))
    assert "HQQ" in str(caught.value) and "I32" not in str(caught.value)
    assert caught.value.param == "quantization_config"


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("gemma2", {"head_dim": 20}), ("bart", {}), ("bert", {}), ("mixtral", {"layer_types": ["fox"] * 2})],
)
def test_a_model_that_cannot_run_is_refused_as_loading_refuses_it(
    model_type: str, changes: dict[str, object], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(make_model(model_type), folder)
    config_with(**changes)(folder)
    loading, looking = both_refusals(str(folder))
    assert loading == looking


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"qwen2", b"qwen9", "tokenizer.ggml.pre 'qwen9' is not supported"),
        (b"qwen3moe.block_count", b"qwen3moe.block_kount", "block_count"),
        (b"general.architecture", b"general.architektur!", "architecture"),
    ],
)
def test_a_gguf_is_refused_as_loading_refuses_it(
    old: bytes, new: bytes, words: str, tiny_gguf: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    raw = tiny_gguf.read_bytes()
    assert raw.count(old) and len(old) == len(new)
    path.write_bytes(raw.replace(old, new))
    loading, looking = both_refusals(str(path))
    assert loading == looking and words in looking
    path.write_bytes(raw[: len(raw) // 2])
    loading, looking = both_refusals(str(path))
    assert loading == looking and "truncated" in looking


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("- match: {name: 'q_proj$'}\n  replace: {op: CpuLinear, device: 'cuda:1'}\n", "would be on cuda:1"),
        ("- match: {class: 'ForCausalLM$'}\n  replace: {op: default, device: cuda}\n", "would be on cuda"),
        ("- match: {class: 'RMSNorm'}\n  replace: {op: CpuLinear}\n", "cannot be replaced by CpuLinear"),
        ("- match: {class: 'Fox'}\n  replace: {op: CpuLinear}\n", "this rule has no effect"),
    ],
)
def test_rules_are_refused_as_loading_refuses_them(rules: str, words: str, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(rules)
    loading, looking = both_refusals(str(tiny), str(file))
    assert loading == looking and words in looking
    assert "rules.yaml" in looking


@pytest.mark.parametrize("rules", ["default", "modules"])
def test_a_gpu_may_have_a_number(rules: str, tiny: Path) -> None:
    report = report_model(str(tiny), rules=rules, device="cuda:1", dtype=torch.bfloat16)
    assert (report.refusal, set(report.device_bytes)) == (None, {"cpu", "cuda:1"})


def test_experts_may_be_elsewhere(tiny: Path) -> None:
    assert report_model(str(tiny), rules="modules", device="cuda", dtype=torch.bfloat16).refusal is None
