"""The layer that predicts further tokens computes what its formula says, and its drafts change no answer."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import PAGE, Cache
from device_engine import on_device
from endless_vocabulary import NoEnd
from next_token_folder import Twin, save_folder
from safetensors.torch import load_file, save_file

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import EmittedChoice
from ktqueue.loading.load import load_model
from ktqueue.loading.model_report import report_model
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.workers.startup.draft_model import next_token_source, report_with_drafts
from ktqueue.workers.startup.gpu_memory import plan_before_loading

RULES = str(Path(__file__).parents[2] / "rules" / "exact.yaml")
FAMILIES = ["deepseek_v3", "glm4_moe", "glm4_moe without norms", "qwen3_next", "qwen3_5_moe"]


def kinds_of(families: list[str]) -> list[Any]:
    """Each family with each kind of engine. On the CPU, one family also has its experts in the memory of the device:
    which memory that is does not depend on the family. Two families differ from another only in what the layer lacks
    or how it is stored, which the engine of the host sees."""
    kinds = ("host", "cpu", "cpu all", "cuda", "cuda all")
    return [
        pytest.param(family, kind, marks=[pytest.mark.gpu] if kind.startswith("cuda") else [])
        for family in families
        for kind in kinds
        if kind != "cpu all" or family == families[0]
        if kind != "cpu" or family not in ("glm4_moe without norms", "qwen3_5_moe")
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Twin]:
    """A folder with such a layer, and its twin."""
    return save_folder(request.param, tmp_path_factory.mktemp("layer"))


@pytest.fixture
def make_engine(by_decoder: str) -> Callable[..., Engine]:
    """make_engine(path, kind, speculation): the engine of a CPU for "host", else that of a GPU on the device `kind`.

    `kind` with "all": all experts are in the memory of the device.
    """

    def make(path: str, kind: str, speculation: str, pages: int = 22) -> Engine:
        if kind.startswith("cuda") and not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")
        device, _, has_experts = kind.partition(" ")
        settings: dict[str, Any] = {
            "model": path,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "page_size": 4,
            "speculation": speculation,
            "interactive_step_ms": 0,
        }
        if kind == "host":
            config, model = EngineConfig(**settings), load_model(path, rules=RULES)
        else:
            settings |= {"device": device, "dtype": "float32", "num_pages": pages}
            config = EngineConfig(**settings, gpu_expert_memory_bytes=1 << 30 if has_experts else 0)
            model = load_model(path, rules=by_decoder, device=device)
        source = next_token_source(config, model) if speculation == "mtp" else None
        if kind != "host":
            return on_device(model, config, source)
        return Engine(
            model.module, NoEnd(model.card_facts.vocab_size), model.kv_layout(4), config, pages, 100, draft=source
        )

    return make


@torch.no_grad()
def test_it_computes_what_the_formula_says(folder: tuple[str, Twin]) -> None:
    """On the CPU, in chunks, from what the model kept of each token."""
    path, twin = folder
    model = load_model(path, rules=RULES)
    source = next_token_source(EngineConfig(model=path, page_size=PAGE), model)
    cache = Cache(model.module)
    size = cache.kv.layout.page_size
    source.keep_hidden(cache.kv.pages, "cpu")
    kept = source.model.hidden
    noise = random.Random(1)
    tokens = [noise.randrange(90) for _ in range(23)]
    cache.step({"a": tokens[:9]}, [8])
    cache.step({"a": tokens[9:]}, [2, 13])
    slots = [cache.pages["a"][place // size] * size + place % size for place in range(23)]
    expected = twin.model.model(torch.tensor([tokens])).last_hidden_state[0]
    torch.testing.assert_close(kept.flatten(0, 1)[slots], expected, atol=2e-4, rtol=2e-4)


def test_a_report_counts_the_layer(folder: tuple[str, Twin]) -> None:
    path, twin = folder
    model = load_model(path, rules=RULES)
    assert isinstance(model.module, CpuDecoder)
    loaded = model.module.device_bytes()["cpu"]
    config = EngineConfig(model=path, page_size=16, speculation="mtp")
    source = next_token_source(config, model)
    plain = report_model(path, rules=RULES)
    report = report_with_drafts(plain, config)
    assert (report.cache_token_bytes - plain.cache_token_bytes) * 16 == source.page_bytes
    counted = report.device_bytes["cpu"] - plain.device_bytes["cpu"]
    tensors = load_file(Path(path) / "model.safetensors").items()
    vectors = [tensor for name, tensor in tensors if name.startswith(twin.prefixes) and tensor.ndim == 1]
    not_counted = 4 * sum(tensor.numel() for tensor in vectors)  # by the model
    assert counted == model.module.device_bytes()["cpu"] - loaded + not_counted
    assert report.rows[-1].device_bytes == counted > 4 * 2 * report.hidden**2


def test_a_report_for_a_gpu_counts_the_layer(folder: tuple[str, Twin], by_decoder: str) -> None:
    """Dense weights on the device, and experts on the host that may move there."""
    path, _ = folder
    model = load_model(path, rules=by_decoder)
    assert isinstance(model.module, GpuDecoder)
    loaded = model.module.device_bytes()["cpu"]
    config = EngineConfig(model=path, page_size=16, speculation="mtp", device="cuda", rules=by_decoder)
    source = next_token_source(config, model)
    plain = report_model(path, rules=by_decoder, device="cuda")
    report = report_with_drafts(plain, config)
    assert (report.cache_token_bytes - plain.cache_token_bytes) * 16 == source.page_bytes
    on_device, on_host = (report.device_bytes[one] - plain.device_bytes[one] for one in ("cuda", "cpu"))
    assert on_device + on_host == model.module.device_bytes()["cpu"] - loaded
    assert report.movable_bytes - plain.movable_bytes == on_host > 0
    off = replace(config, speculation="off")
    cache = [plan_before_loading(*planned, 8 << 30).pages for planned in ((plain, off), (report, config))]
    assert cache[1] < cache[0]


def test_a_float8_cache_of_the_layer_has_scales_of_its_own(
    folder: tuple[str, Twin], by_decoder: str, tmp_path: Path
) -> None:
    original, twin = folder
    path = str(shutil.copytree(original, tmp_path / "changed"))
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{twin.prefixes[0]}input_layernorm.weight"] *= 10_000
    save_file(tensors, file)
    model = load_model(path, rules=by_decoder)
    config = EngineConfig(model=path, speculation="mtp", device="cuda", rules=by_decoder)
    (scale,) = next_token_source(config, model, torch.float8_e4m3fn).layout.scales
    assert scale.value > 16 > model.kv_layout(16, torch.float8_e4m3fn).scale(0).value
    assert next_token_source(config, model).layout.scales == ()


@pytest.fixture(scope="module")
def without_drafts() -> dict[Any, Any]:
    """What the next tests found without drafts, once for all kinds of one device: all compute the same tokens."""
    return {}


@pytest.mark.parametrize(("folder", "kind"), kinds_of(FAMILIES), indirect=["folder"])
@torch.no_grad()
def test_drafts_are_those_of_the_twin(
    folder: tuple[str, Twin], make_engine: Callable[..., Engine], without_drafts: dict[Any, Any], kind: str
) -> None:
    """In an engine that preempts, shares prefixes and verifies drafts that are mostly wrong. Answers stay the same.

    One request continues what another worker began.
    """
    path, twin = folder
    noise = random.Random(2)
    stem = [noise.randrange(90) for _ in range(20)]
    # The key of a place depends on the next token too, so that token is shared with each page.
    prompts = [stem[: 4 * number + 1] + [noise.randrange(90) for _ in range(1 + number)] for number in range(5)]
    case = path, kind.startswith("cuda")
    answers: list[dict[str, list[int]]] = [without_drafts[case]] if case in without_drafts else []
    checked = 0
    for speculation in ("off", "mtp")[len(answers) :]:
        engine = make_engine(path, kind, speculation)
        for number, prompt in enumerate(prompts):
            begun = EmittedChoice(token_ids=tuple(answers[0]["3"][:7])) if answers and number == 3 else EmittedChoice()
            sampling = SamplingParams(temperature=(0.0, 1.0)[number == 4], seed=number, max_tokens=20)
            engine.add(str(number), prompt, sampling, emitted=[begun])
        if speculation == "mtp":
            engine.drafts.probed = 3
            drafter: Any = engine.drafts._model
            make: Callable[..., Any] = drafter.drafts

            def compare(counts: Any, make: Callable[..., Any] = make) -> Any:
                nonlocal checked
                found = make(counts)
                for sequence, drafts in found.items():
                    if sequence.request.sampling.temperature == 0.0:
                        known = sequence.tokens[: sequence.length].tolist()
                        assert drafts == twin.chain(known, len(drafts))
                        checked += 1
                return found

            drafter.drafts = compare
        answers.append(tokens_of(engine))
    without_drafts[case] = answers[0]
    answers[1]["3"] = answers[0]["3"][:7] + answers[1]["3"]
    assert answers[0] == answers[1]
    stats = engine.stats()
    assert checked > 30 and stats.drafted_tokens > 100 and stats.preemptions > 0
    assert stats.prefix_hits > 0 or twin.is_qwen  # whose prefixes end at snapshots


@pytest.fixture(scope="module")
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a layer that knows the next tokens."""
    return save_folder(request.param, tmp_path_factory.mktemp("right"), is_right=True)[0]


@pytest.mark.parametrize(("right", "kind"), kinds_of(["deepseek_v3", "glm4_moe", "qwen3_next"]), indirect=["right"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_drafts_save_steps(
    right: str,
    make_engine: Callable[..., Engine],
    without_drafts: dict[Any, Any],
    temperature: float,
    kind: str,
) -> None:
    """Of three drafts a step all are right, greedy or sampled."""
    case = right, temperature, kind.startswith("cuda")
    found = [without_drafts[case]] if case in without_drafts else []
    for speculation in ("off", "mtp")[len(found) :]:
        engine = make_engine(right, kind, speculation, 60)
        engine.drafts.probed = 3 if speculation == "mtp" else 0
        for number in range(3):
            sampling = SamplingParams(temperature=temperature, seed=number, max_tokens=25)
            engine.add(str(number), [number, 7, 9][: number + 1], sampling)
        found.append((tokens_of(engine), engine.stats().steps))
    without_drafts[case] = found[0]
    answers, steps = zip(*found, strict=True)
    assert answers[0] == answers[1]
    assert engine.stats().accepted_tokens == engine.stats().drafted_tokens > 50
    assert steps[0] > 24 and steps[1] < 10


def tokens_of(engine: Engine) -> dict[str, list[int]]:
    """The tokens of all requests, which must not fail."""
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step(lambda: True):
            assert output.error is None
            found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    engine.close()
    return found


def test_a_model_without_such_a_layer_is_refused() -> None:
    config = EngineConfig(speculation="mtp")
    with pytest.raises(ConfigError, match=r"engine.speculation must be off, lookup or model for this model"):
        next_token_source(config, load_model("demo"))
