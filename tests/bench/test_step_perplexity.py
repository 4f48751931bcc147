"""The measurement of perplexity by the shape of steps, on tensors of the CPU."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import make_model
from tiny_tokenizer import write_tokenizer

from benchmarks.quality import step_perplexity
from benchmarks.quality.scored_texts import Sums
from benchmarks.quality.step_perplexity import ON_CPU, ROUNDED, Shape, compare, shapes_of
from ktqueue.loading.load import load_model

RULES = "- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n"


def test_sums_of_two_ways_give_the_change_and_its_error() -> None:
    """Of two tokens, one is half as likely as on the CPU in float32, and one is as likely."""
    expected = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    found = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
    sums = Sums()
    sums.add(found, expected, torch.tensor([0, 1]))
    figure = sums.figure(usual=1 / math.sqrt(0.5 * 0.75))
    assert figure["perplexity"] == pytest.approx(1 / math.sqrt(0.25 * 0.75))
    assert figure["change"] == pytest.approx(100 * (math.sqrt(2) - 1))
    assert figure["error"] == pytest.approx(100 * math.log(2) / 2 / math.sqrt(2))
    assert figure["kl"] == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2, abs=1e-6)
    assert figure["same"] == 50.0


def test_every_shape_of_steps_says_what_the_cpu_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is rounded on CPU tensors. 11 tokens are no multiple of any step."""
    (tmp_path / "rules.yaml").write_text(RULES)
    make_model("qwen3_moe", vocab_size=400, num_experts=16, num_experts_per_tok=4).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", 400)

    def load_exactly(name: str, device: str, dtype: torch.dtype) -> Any:
        return load_model(name, rules=str(tmp_path / "rules.yaml"), dtype=torch.float32)

    monkeypatch.setattr(step_perplexity, "load_model", load_exactly)
    windows = torch.randint(400, (5, 11), generator=torch.Generator().manual_seed(0))
    *_, figures = compare(str(tmp_path / "model"), "cpu", windows, shapes_of("1x8,4x1,2x3"), threads=1)
    found = {(figure["steps"], figure["cache"]): figure for figure in figures}
    for shape in (Shape(1, 8), Shape(4, 1), Shape(2, 3)):
        computed, rounded = found[str(shape), "as computed"], found[str(shape), ROUNDED]
        assert abs(computed["change"]) < 1e-3 and computed["kl"] < 1e-6 and computed["same"] == 100.0
        assert computed["pairs"] == shape.rows * shape.tokens * 4 / 16
        assert 1e-4 < rounded["kl"] < 0.1
    assert found[ON_CPU, "as computed"]["change"] == 0
