"""Decode is measured with the next step launched before the tokens of a step are read, after that, or by the caller."""

from pathlib import Path

import pytest
from device_engine import on_device

from ktqueue.bench.engine import LAUNCHES, measure_decode, prompts
from ktqueue.core.config import EngineConfig
from ktqueue.loading.load import load_model


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_next_step_is_launched_as_asked(launch: str, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n")
    config = EngineConfig(device="cpu", max_num_seqs=4, dtype="float32", num_pages=100, interactive_step_ms=0)
    engine = on_device(load_model("demo", rules=str(rules)), config)
    measured = measure_decode(engine, prompts(3, 9, 100), 12, launch=launch)
    engine.close()
    assert measured.tokens == 3 * 11 and engine.stats().prepared_steps == 11
    assert engine.stats().steps_ahead == (10 if launch == "ahead" else 0)
