"""The layer that predicts further tokens computes what its formula says, and its drafts change no answer.

transformers has no such layer. The twin here follows DeepSeek-V3 (arXiv 2412.19437, equations 21 to 23), with a layer
of transformers.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import Cache, make_model
from endless_vocabulary import NoEnd
from safetensors.torch import load_file, save_file

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ConfigError
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.loading.load import load_model
from ktqueue.loading.model_report import report_model
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.workers.startup.draft_model import next_token_source, report_with_drafts

RULES = str(Path(__file__).parents[2] / "rules" / "exact.yaml")
LAYERS = 3


class Twin:
    """A model of transformers, and the layer behind its own."""

    def __init__(self, model: Any, deeper: Any, extra: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.extra = extra
        self.deeper = deeper
        layer = deeper.model.layers[LAYERS]
        layer.self_attn.layer_idx = 0
        deeper.model.layers = torch.nn.ModuleList([layer])
        deeper.model.norm = torch.nn.Identity()
        deeper.config.num_hidden_layers = 1

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        found: torch.Tensor = x * scale * self.extra[name]
        return found

    def chain(self, tokens: list[int], count: int) -> list[int]:
        """The `count` likeliest drafts after `tokens`."""
        hidden = self.model.model(torch.tensor([tokens])).last_hidden_state[:, :-1]
        drafts: list[int] = []
        for _ in range(count):
            embedded = self.model.model.embed_tokens(torch.tensor([tokens[1:] + drafts]))
            parts = [self.normed(embedded, "enorm.weight"), self.normed(hidden, "hnorm.weight")]
            x = torch.nn.functional.linear(torch.cat(parts, -1), self.extra["eh_proj.weight"])
            last = self.deeper.model(inputs_embeds=x, use_cache=False).last_hidden_state[:, -1:]
            drafts.append(int(self.model.lm_head(self.normed(last, "shared_head.norm.weight"))[0, 0].argmax()))
            hidden = torch.cat([hidden, last], 1)
        return drafts


@pytest.fixture(params=["deepseek_v3", "glm4_moe", "glm4_moe without norms"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Twin]:
    """A folder with such a layer, and its twin."""
    deeper = make_model(request.param, num_hidden_layers=LAYERS + 1)
    model = make_model(request.param, num_hidden_layers=LAYERS)
    prefix = f"model.layers.{LAYERS}."
    weights = {name: tensor for name, tensor in deeper.state_dict().items() if not name.startswith(prefix)}
    model.load_state_dict(weights)
    model.save_pretrained(tmp_path / "model")
    deeper.save_pretrained(tmp_path / "deeper")
    hidden = model.config.hidden_size
    torch.manual_seed(5)
    extra = {name: torch.rand(hidden) + 0.5 for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    extra["eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.1
    file = tmp_path / "model" / "model.safetensors"
    own = load_file(file)
    further = {
        name: tensor
        for name, tensor in load_file(tmp_path / "deeper" / "model.safetensors").items()
        if name.startswith(prefix)
    }
    save_file(own | further | {prefix + name: tensor for name, tensor in extra.items()}, file, {"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return str(tmp_path / "model"), Twin(model, deeper, extra)


@torch.no_grad()
def test_it_computes_what_the_formula_says(folder: tuple[str, Twin]) -> None:
    """On the CPU, in chunks, from what the model kept of each token."""
    path, twin = folder
    model = load_model(path, rules=RULES)
    source = next_token_source(EngineConfig(model=path, page_size=16), model)
    cache = Cache(model.module)
    size = cache.kv.layout.page_size
    kept = torch.zeros(cache.kv.pages, size, source.layer.hidden_size)
    source.layer.keep_hidden(kept)
    noise = random.Random(1)
    tokens = [noise.randrange(90) for _ in range(23)]
    cache.step({"a": tokens[:9]}, [8])
    cache.step({"a": tokens[9:]}, [2, 13])
    slots = [cache.pages["a"][place // size] * size + place % size for place in range(23)]
    expected = twin.model.model(torch.tensor([tokens])).last_hidden_state[0]
    torch.testing.assert_close(kept.flatten(0, 1)[slots], expected, atol=2e-4, rtol=2e-4)


def test_a_report_counts_the_layer(folder: tuple[str, Twin]) -> None:
    path, _ = folder
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
    vectors = [tensor for name, tensor in tensors if name.startswith(f"model.layers.{LAYERS}.") and tensor.ndim == 1]
    not_counted = 4 * sum(tensor.numel() for tensor in vectors)  # by the model
    assert counted == model.module.device_bytes()["cpu"] - loaded + not_counted
    assert report.rows[-1].device_bytes == counted > 4 * 2 * report.hidden**2


@torch.no_grad()
def test_drafts_are_those_of_the_twin(folder: tuple[str, Twin]) -> None:
    """In an engine that preempts, shares prefixes and verifies drafts that are mostly wrong. Answers stay the same."""
    path, twin = folder
    noise = random.Random(2)
    stem = [noise.randrange(90) for _ in range(20)]
    prompts = [stem[: 4 * number] + [noise.randrange(90) for _ in range(2 + number)] for number in range(5)]
    answers, checked = [], 0
    for speculation in ("off", "mtp"):
        model = load_model(path, rules=RULES)
        config = EngineConfig(
            model=path,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            page_size=4,
            speculation=speculation,
            interactive_step_ms=0,
        )
        source = next_token_source(config, model) if speculation == "mtp" else None
        engine = Engine(
            model.module, NoEnd(model.card_facts.vocab_size), model.kv_layout(4), config, 28, 100, draft=source
        )
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=(0.0, 1.0)[number == 4], seed=number, max_tokens=20)
            engine.add(str(number), prompt, sampling)
        if source is not None:
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
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
            engine.check()
        answers.append(found)
    assert answers[0] == answers[1]
    stats = engine.stats()
    assert checked > 30 and stats.drafted_tokens > 100 and stats.preemptions > 0 and stats.prefix_hits > 0


def test_a_model_without_such_a_layer_is_refused() -> None:
    config = EngineConfig(speculation="mtp")
    with pytest.raises(ConfigError, match=r"engine.speculation must be off, lookup or model for this model"):
        next_token_source(config, load_model("demo"))
