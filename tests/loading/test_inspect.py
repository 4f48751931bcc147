"""The inspect report: every byte of the file is in a row, and devices follow the plan."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ktqueue.loading.inspect import inspect
from ktqueue.loading.load import load_model
from ktqueue.operators.decoder import CpuDecoder


def test_report_of_the_demo_model() -> None:
    report = inspect("demo")
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
    report = inspect(str(make_model(model_type)), rules=str(rules), device="cuda")
    assert sum(row.file_bytes for row in report.rows) == 4 * report.parameters
    assert set(report.device_bytes) == {"cpu", "cuda", "cuda:1"}
    operators = {(row.operator, row.device) for row in report.rows if row.name.endswith("experts")}
    assert operators == {("CpuExperts", "cpu"), ("default", "cuda:1")}
