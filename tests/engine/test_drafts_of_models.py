"""Drafts change no answer of real models, on the kernels of the CPU and on the operators of a GPU."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from decoder_families import make_model as make_family
from device_engine import on_device
from endless_vocabulary import NoEnd

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.loading.load import load_model

FAMILIES = ["qwen3_moe with a window", "gpt_oss", "llama4", "gemma4 with experts", "deepseek_v32"]


# The demo model on a device has drafts in tests/gpu/test_engine.py.
@pytest.mark.parametrize(("kind", "family"), [("host", "demo"), *itertools.product(["host", "device"], FAMILIES)])
def test_kernels_compute_drafts_alike(
    tmp_path: Any, by_decoder: str, free_drafts: None, family: str, kind: str
) -> None:
    """Greedy and drawn answers of real models, some of which repeat their prompts, in batches of any mix.

    "device": the operators of a GPU on tensors of the CPU, in float32, with captured steps.
    """
    if family != "demo":
        make_family(family).save_pretrained(tmp_path / "model")
    model = load_model(
        "demo" if family == "demo" else str(tmp_path / "model"), rules=by_decoder if kind == "device" else None
    )
    size = model.card_facts.vocab_size
    noise = random.Random(1)
    prompts = [4 * [noise.randrange(96) for _ in range(noise.randint(2, 30))] for _ in range(6)]
    answers, stats = [], []
    for speculation in ("off", "lookup"):
        config = EngineConfig(
            max_num_seqs=6, max_num_batched_tokens=64, page_size=4, speculation=speculation, interactive_step_ms=0
        )
        if kind == "device":
            engine = on_device(model, replace(config, dtype="float32", num_pages=150))
        else:
            engine = Engine(model.module, NoEnd(size), model.kv_layout(4), config, 150, 250)
        found: dict[Any, list[int]] = {}
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=(0.0, 0.3)[number % 2], seed=number, max_tokens=24, n=1 + number % 2)
            engine.add(str(number), prompt, sampling)
        while engine.has_work:
            for output in engine.step(lambda: True):
                assert output.error is None
                found.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            engine.check()
        answers.append(found)
        stats.append(engine.stats())
    assert answers[0] == answers[1]
    assert stats[0].drafted_tokens == 0 < stats[1].accepted_tokens < stats[1].drafted_tokens


def test_models_with_changing_angles_have_no_drafts(tmp_path: Any, free_drafts: None) -> None:
    make_family("qwen3 with longrope").save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    config = EngineConfig(max_num_seqs=2, page_size=4, speculation="lookup")
    engine = Engine(model.module, NoEnd(96), model.kv_layout(4), config, 60, 200)
    engine.add("x", 4 * [7, 8, 9, 10], SamplingParams(temperature=0.0, max_tokens=60))
    while engine.has_work:
        engine.step()
    assert engine.stats().drafted_tokens == 0
