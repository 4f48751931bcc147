"""A worker's draft model: its settings, its vocabulary, and a real one that drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from endless_vocabulary import NoEnd

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.request import SamplingParams
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.workers.startup.build import build, report_of
from ktqueue.workers.startup.draft_model import check_draft_model, load_draft_model

EXACT = str(Path(__file__).parents[3] / "rules" / "exact.yaml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculation": "model"}, "engine.speculation must be model only with engine.draft_model"),
        ({"draft_model": "demo"}, "engine.draft_model must be left out unless engine.speculation is model"),
        ({"speculation": "mtp", "draft_model": "demo"}, "engine.draft_model must be left out unless"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_draft_model(EngineConfig(**settings))


def test_random_weights_predict_no_further_tokens() -> None:
    config = EngineConfig(model="synthetic:tiny:q8_0", speculation="mtp", max_num_seqs=1, num_pages=8)
    for use in (report_of, build):
        with pytest.raises(ConfigError, match="synthetic:tiny:q8_0 has random weights, but no layer that predicts"):
            use(config)


def test_another_vocabulary_is_refused() -> None:
    config = EngineConfig(speculation="model", draft_model="demo")
    size = load_tokenizer("demo").size
    with pytest.raises(
        ConfigError, match=r"engine.draft_model must be a model with the same vocabulary, .* token 0 is"
    ):
        load_draft_model(config, NoEnd(size))


def test_a_vocabulary_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(speculation="model", draft_model="demo")
    tokenizer = load_tokenizer("demo")
    shorter = type("Shorter", (), {"size": tokenizer.size - 1, "special_token_bytes": tokenizer.special_token_bytes})
    with pytest.raises(ConfigError, match=f"of {tokenizer.size - 1} tokens; it has {tokenizer.size}"):
        load_draft_model(config, shorter())


def test_a_report_counts_the_draft_model() -> None:
    config = EngineConfig(speculation="model", draft_model="demo")
    plain, report = report_of(EngineConfig()), report_of(config)
    draft = load_draft_model(config, load_tokenizer("demo"))
    assert draft is not None
    assert (report.cache_token_bytes - plain.cache_token_bytes) * config.page_size == draft.page_bytes
    assert report.device_bytes["cpu"] == 2 * plain.device_bytes["cpu"]
    with pytest.raises(ConfigError, match="must be model only with"):
        report_of(EngineConfig(speculation="model"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_drafts_for_itself(temperature: float, device: str) -> None:
    """Real kernels: the draft model is the same as the model, so its drafts are right.

    On a GPU, which experts of a step are rounded depends on its rows. So there nothing is rounded.
    """
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    answers = []
    rules = EXACT if device == "cuda" else None
    ways: list[dict[str, Any]] = [{}, {"speculation": "model", "draft_model": "demo"}]
    for settings in ways:
        config = EngineConfig(
            device=device, dtype="float32", num_pages=30, threads=1, max_num_seqs=4, rules=rules, **settings
        )  # fmt: skip
        built = build(config)
        engine = built.engine
        engine.drafts.probed = 4 if settings else 0
        found: dict[str, list[int]] = {}
        for number in range(3):
            prompt = built.tokenizer.encode("Once upon a time"[: 5 + 4 * number])
            engine.add(str(number), prompt, SamplingParams(temperature=temperature, seed=number, max_tokens=40))
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
        answers.append(found)
        engine.close()
    assert answers[0] == answers[1]
    assert engine.stats().accepted_tokens == engine.stats().drafted_tokens > 60
