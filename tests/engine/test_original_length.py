"""Models of longrope: every token is that of a fresh model of transformers, called with all tokens before it at once.

So the angles of a sequence depend on its own length alone, whatever else is in the step, and change for all its tokens
when it grows beyond the original length.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import make_model, tokens
from device_engine import on_device
from endless_vocabulary import NoEnd

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import EmittedChoice
from ktqueue.loading.load import load_model

ORIGINAL = 16  # of the family
NEW_TOKENS = 12
GPU_RULES = "- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n"
CONFIG = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, page_size=4)
PAGES = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
TEXT = tokens(30, 7)
PROMPTS = [TEXT[:length] for length in (9, ORIGINAL - 2, ORIGINAL - NEW_TOKENS, ORIGINAL, ORIGINAL + 1, 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("longrope")
    make_model("qwen3 with longrope").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    model, found = make_model("qwen3 with longrope"), []
    for prompt in PROMPTS:
        ids = [*prompt]
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.fixture(
    params=[
        ("exact", "cpu"),
        ("modules", "cpu"),
        ("GpuDecoder", "cpu"),
        pytest.param(("GpuDecoder", "cuda"), marks=pytest.mark.gpu),
    ],
    ids=" on ".join,
)
def engine(request: Any, folder: Path) -> Iterator[Engine]:
    rules, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if rules == "GpuDecoder":
        (path := folder / "gpu.yaml").write_text(GPU_RULES)
        config = replace(CONFIG, device=device, dtype="float32", num_pages=PAGES, cuda_graphs=True)
        made = on_device(load_model(str(folder), rules=str(path), device=device), config)
    else:
        model = load_model(str(folder), rules=rules)
        longest = model.card_facts.max_position_embeddings
        made = Engine(model.module, NoEnd(96), model.kv_layout(CONFIG.page_size), CONFIG, PAGES, longest)
    yield made
    made.close()


def run(engine: Engine, found: dict[tuple[str, int], list[int]]) -> None:
    while engine.has_work:
        for output in engine.step(lambda: True):
            assert output.error is None
            found.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        engine.check()


def test_a_sequence_has_the_angles_of_its_own_length(
    engine: Engine, answers: list[list[int]], request: pytest.FixtureRequest
) -> None:
    found: dict[tuple[str, int], list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, GREEDY)
    run(engine, found)
    assert [found[str(i), 0] for i in range(len(PROMPTS))] == answers
    stats = engine.stats()
    assert stats.prefix_hits and stats.preemptions
    assert (stats.prepared_steps > 0) == ("GpuDecoder" in request.node.name)


def test_resumed_choices_of_a_prompt_have_the_angles_of_their_own_lengths(
    engine: Engine, answers: list[list[int]]
) -> None:
    """The first computes the prompt with others than the second needs, then the other way round."""
    answer = answers[1]
    found: dict[tuple[str, int], list[int]] = {}
    for name, lengths in (("a", (4, 1, 0, 5)), ("b", (1, 4))):
        emitted = [EmittedChoice(token_ids=tuple(answer[:length])) for length in lengths]
        found |= {(name, i): answer[:length] for i, length in enumerate(lengths)}
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, n=len(lengths), seed=1)
        engine.add(name, PROMPTS[1], sampling, emitted=emitted)
    run(engine, found)
    assert all(token_ids == answer for token_ids in found.values())


def test_a_resumed_choice_does_not_wait_until_another_needs_its_angles(engine: Engine) -> None:
    """The first choice has the short ones for twelve tokens, the second has the long ones at once."""
    emitted = [EmittedChoice(), EmittedChoice(token_ids=tuple(TEXT[: ORIGINAL - 3]))]
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS + 8, n=2, seed=1)
    engine.add("x", PROMPTS[2], sampling, emitted=emitted)
    computed = [{output.index for output in engine.step()} for _ in range(8)]
    assert {0, 1} in computed
