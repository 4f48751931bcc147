"""Sampling parameters that a model's files recommend."""

import json
import logging
from pathlib import Path

import gguf
import pytest
from checkpoint_files import finish

from ktqueue.loading.sampling_defaults import sampling_defaults


def test_a_folder_recommends_by_its_generation_config(tmp_path: Path) -> None:
    assert sampling_defaults(str(tmp_path)) == {}
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_wrong_values_are_logged_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": -1, "top_k": "many", "top_p": 0.5}')
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults(str(tmp_path)) == {"top_p": 0.5}
    assert "temperature" in caplog.text
    assert "top_k" in caplog.text


def test_a_gguf_file_recommends_by_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    finish(writer)
    assert sampling_defaults(str(path)) == {"temperature": 0.5, "top_k": 40}


def test_some_models_recommend_nothing() -> None:
    assert sampling_defaults("demo") == {}
    assert sampling_defaults("synthetic:qwen3-30b-a3b:q4_k_m:2") == {}
