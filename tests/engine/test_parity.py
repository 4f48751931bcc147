"""Greedy output is what transformers chooses, token for token, under any schedule.

64 requests arrive at random steps with prompts of 1 to 700 tokens, in steps of at most 16, 64 and
512 tokens, with and without prefix reuse, and with so few pages that sequences are preempted.
The random model always runs each size of a step, and each pair of the others. The engine loads the demo
model from its quantised file, and transformers gets the same weights dequantised. Of its matrix, two
corners always run with 14 of the requests. `-m parity` runs both matrices whole.
"""

import copy
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_families import LINEAR
from endless_vocabulary import NoEnd
from greedy_requests import REQUESTS, make_prompts, serve
from latent_sizes import LATENT_SIZES
from transformers import (
    AttentionInterface,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.engine.outputs import EmittedChoice
from ktqueue.loading.load import load_model, open_checkpoint
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators import attention
from ktqueue.operators.kv_cache import KVLayout

# The first test of each model waits for the answers of transformers, one prompt after the other. On a busy machine
# this takes longer than the usual limit of two minutes, which includes fixtures.
pytestmark = pytest.mark.timeout(600)

EXACT_RULES = Path(__file__).parents[2] / "rules" / "exact.yaml"  # activations stay float32
FEW = 14
GENERATED = 2  # prompts
NEW_TOKENS = 24
LONGEST = 700
PAGE_SIZE = 16


def float_model(kind: Any, config: Any) -> Any:
    """Prepare a model of transformers for inference in float32."""
    return kind(config).eval().float()


class GreedyAnswers:
    """The tokens that transformers generates for each prompt alone.

    Of the first prompts, `generate` gives the tokens. Of the others, the model computes prompt and tokens at once, and
    must choose each token after those before it, as `generate` would.
    """

    def __init__(self, model: Any, prompts: list[list[int]], end: list[int] | None) -> None:
        self._model = model
        self._prompts = prompts
        self._end = end
        self._known: list[list[int]] = []

    def check(self, found: list[list[int]]) -> None:
        """Assert that these are the answers of the first prompts."""
        for prompt, tokens in list(zip(self._prompts, found, strict=False))[len(self._known) :]:
            if len(self._known) < GENERATED:
                self._known.append(self._generate(prompt))
            else:
                assert self._choices(prompt, tokens) == tokens
                end = self._end or []
                assert not set(tokens[:-1]) & set(end) and (len(tokens) == NEW_TOKENS or tokens[-1] in end)
                self._known.append(tokens)
        assert found == self._known[: len(found)]

    @torch.inference_mode()
    def _generate(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": self._end, "pad_token_id": 0}
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    @torch.inference_mode()
    def _choices(self, prompt: list[int], tokens: list[int]) -> list[int]:
        logits = self._model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        choices: list[int] = logits.argmax(-1).tolist()
        return choices


def check_parity(
    model: Any, vocabulary: Any, layout: Any, prompts: Any, answers: GreedyAnswers, *,
    budget: int, caching: bool, pages: int,
) -> None:  # fmt: skip
    """Assert that greedy tokens are `answers` in steps of `budget` tokens, with preemption and reuse."""
    config = EngineConfig(
        max_num_seqs=32, max_num_batched_tokens=budget, enable_prefix_caching=caching, page_size=PAGE_SIZE
    )
    engine = Engine(model, vocabulary, layout, config, pages, 1024)
    found = serve(engine, prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
    assert (engine.stats().preemptions > 0) == (pages == 46)
    assert (engine.stats().prefix_hits > 0) == caching
    assert len(found) == len(prompts)
    answers.check(found)


@pytest.fixture(scope="module")
def random_model() -> Any:
    """A random Qwen3-MoE in float32, prompts and transformers' answers."""
    make_config: Any = Qwen3MoeConfig  # its signature lacks head_dim
    config = make_config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = float_model(Qwen3MoeForCausalLM, config)
    prompts = make_prompts(config.vocab_size, LONGEST)
    return model, prompts, GreedyAnswers(model, prompts, None)


@pytest.fixture(scope="module", params=["modules of transformers", "CpuDecoder"])
def tiny(request: Any, random_model: Any, tmp_path_factory: Any) -> Any:
    """The random model on paged attention or as one operator, with its vocabulary, layout, prompts and answers."""
    model, prompts, answers = random_model
    if request.param == "CpuDecoder":
        folder = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(folder)
        paged = load_model(str(folder)).module
        assert type(paged).__name__ == "CpuDecoder"
    else:
        AttentionInterface.register(attention.NAME, attention.paged_attention)
        paged = copy.deepcopy(model)
        paged.set_attn_implementation(attention.NAME)
    layout = KVLayout(layers=2, kv_heads=2, head_dim=16, page_size=PAGE_SIZE, dtype=torch.float32)
    return paged, NoEnd(model.config.vocab_size), layout, prompts, answers


# Schedules do not depend on what computes a step, so the modules have the two that differ most.
@pytest.mark.parametrize(
    ("tiny", "budget", "caching", "pages"),
    [
        *(("CpuDecoder", *case) for case in ((16, True, 46), (64, False, 2000), (512, False, 46), (512, True, 2000))),
        *(("modules of transformers", *case) for case in ((16, True, 46), (512, False, 2000))),
    ],
    indirect=["tiny"],
)
def test_tiny_random_model(tiny: Any, budget: int, caching: bool, pages: int) -> None:
    check_parity(*tiny, budget=budget, caching=caching, pages=pages)


@pytest.mark.parity
@pytest.mark.parametrize("pages", [46, 2000])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [16, 64, 512])
def test_tiny_random_model_whole_matrix(tiny: Any, budget: int, caching: bool, pages: int) -> None:
    check_parity(*tiny, budget=budget, caching=caching, pages=pages)


@pytest.mark.parametrize("budget", [16, 512])
def test_log_probabilities_of_prompts_equal_those_of_transformers(tiny: Any, random_model: Any, budget: int) -> None:
    model, vocabulary, layout, prompts, _ = tiny
    reference = random_model[0]
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=budget, page_size=PAGE_SIZE)
    engine = Engine(model, vocabulary, layout, config, 200, 1024)
    scored = [*[prompt for prompt in prompts if 1 < len(prompt) < 300][:12], prompts[6]]
    for i, prompt in enumerate(scored):
        engine.add(str(i), prompt, SamplingParams(max_tokens=0, prompt_logprobs=3))
    found: dict[str, list[Any]] = {str(i): [] for i in range(len(scored))}
    while engine.has_work:
        for one in engine.step():
            found[one.request_id] += one.prompt_logprobs
    for i, prompt in enumerate(scored):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0].double().log_softmax(dim=-1)
        first, *entries = found[str(i)]
        assert first is None and [entry.chosen.token_id for entry in entries] == prompt[1:]
        chosen = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        assert [entry.chosen.logprob for entry in entries] == pytest.approx(chosen.tolist(), abs=1e-3)
        top = [[token.logprob for token in entry.top] for entry in entries]
        for values, best in zip(top, expected[:-1].topk(3).values.tolist(), strict=True):
            assert values == pytest.approx(best, abs=1e-3)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: Any) -> Any:
    """Like `tiny`, but a random DeepSeek-V2 with all features of the family, loaded by the default rules."""
    config = DeepseekV2Config(
        **LATENT_SIZES | {"q_lora_rank": 48},
        vocab_size=512,
        num_hidden_layers=3,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=2.0,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    model = float_model(DeepseekV2ForCausalLM, config)
    folder = tmp_path_factory.mktemp("latent")
    model.save_pretrained(folder)
    prompts = make_prompts(config.vocab_size, LONGEST)[:FEW]
    loaded = load_model(str(folder))
    return loaded.module, NoEnd(512), loaded.kv_layout(PAGE_SIZE), prompts, GreedyAnswers(model, prompts, None)


@pytest.mark.parametrize(("budget", "caching", "pages"), [(64, True, 46), (512, False, 46), (16, True, 2000)])
def test_a_model_with_latent_attention_gives_transformers_tokens(
    latent: Any, budget: int, caching: bool, pages: int
) -> None:
    check_parity(*latent, budget=budget, caching=caching, pages=pages)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: Any) -> Any:
    """Like `latent`, but a random Qwen3-Next, whose sequences have states beside their pages."""
    make_config: Any = Qwen3NextConfig
    config = make_config(
        **LINEAR,
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(2)
    model = float_model(Qwen3NextForCausalLM, config)
    folder = tmp_path_factory.mktemp("linear")
    model.save_pretrained(folder)
    prompts = make_prompts(config.vocab_size, LONGEST)
    loaded = load_model(str(folder))
    assert type(loaded.module).__name__ == "CpuDecoder"
    return loaded.module, NoEnd(512), loaded.kv_layout(PAGE_SIZE), prompts, GreedyAnswers(model, prompts, None)


@pytest.mark.parametrize(
    ("budget", "caching", "pages"), [(64, True, 46), (512, False, 46), (16, True, 2000), (512, True, 2000)]
)
def test_a_model_with_linear_attention_gives_transformers_tokens(
    linear: Any, budget: int, caching: bool, pages: int
) -> None:
    check_parity(*linear, budget=budget, caching=caching, pages=pages)


SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=NEW_TOKENS)


def run_all(engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
    """Token ids of requests that are all added before the first step."""
    for name, (prompt, sampling) in requests.items():
        engine.add(name, prompt, sampling)
    found: dict[str, list[int]] = {name: [] for name in requests}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    return found


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(tiny: Any) -> None:
    """The tokens are equal though the batches differ: with these seeds no draw is decided by rounding."""
    model, vocabulary, layout, prompts, _ = tiny
    mine = {f"mine {i}": (prompts[8 + i], dataclasses.replace(SEEDED, seed=i)) for i in range(8)}
    others = {f"other {i}": (prompts[16 + i], dataclasses.replace(SEEDED, seed=90 + i)) for i in range(24)}
    config = EngineConfig(max_num_seqs=32, max_num_batched_tokens=512, page_size=PAGE_SIZE)
    alone: dict[Any, Any] = {}
    for name, request in mine.items():
        alone |= run_all(Engine(model, vocabulary, layout, config, 2000, 1024), {name: request})
    crowd = Engine(model, vocabulary, layout, config, 2000, 1024)
    short = Engine(model, vocabulary, layout, config, 60, 1024)
    assert {name: tokens for name, tokens in run_all(crowd, others | mine).items() if name in mine} == alone
    assert {name: tokens for name, tokens in run_all(short, others | mine).items() if name in mine} == alone
    assert crowd.stats().preemptions == 0 < short.stats().preemptions
    assert len({tuple(tokens) for tokens in alone.values()}) == 8


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS), SEEDED])
def test_resumed_at_every_token(tiny: Any, sampling: Any) -> None:
    model, vocabulary, layout, prompts, _ = tiny
    config = EngineConfig(max_num_seqs=32, max_num_batched_tokens=64, page_size=PAGE_SIZE)
    prompt = prompts[5] + prompts[4]
    expected = run_all(Engine(model, vocabulary, layout, config, 100, 1024), {"x": (prompt, sampling)})["x"]
    for cut in range(NEW_TOKENS):
        engine = Engine(model, vocabulary, layout, config, 100, 1024)
        emitted = [EmittedChoice(token_ids=tuple(expected[:cut]), text_length=cut)]
        engine.add("x", prompt, sampling, emitted=emitted)
        found = []
        while engine.has_work:
            found += [token for output in engine.step() for token in output.token_ids]
        assert expected[:cut] + found == expected


TALE = """Once upon a time there lived in the deep green wood an old woman who had three daughters and a black hen.
The eldest was proud, the second was idle, but the youngest was kind to man and beast. "Go to the well," said the
mother, "and fetch me water in a sieve." So the maiden went, and wept, and a little frog came up out of the water and
said, "Why do you weep, dear child? Take moss and clay, and stop the holes, and carry it home." When the king's son
rode by he saw her, and asked her name, and she told him all that had happened. Then he took her upon his horse and
they came to a castle of glass, where a wolf lay at the gate and twelve ravens sat upon the roof. """


def make_texts(tokenizer: Any) -> list[list[int]]:
    """64 prompts of 1 to 700 tokens from a story. Prompts that begin at the same word share a prefix."""
    noise = random.Random(64)
    words = TALE.split(" ")
    prompts = []
    for i in range(REQUESTS):
        start = noise.choice((0, 24, 48))
        ids = tokenizer.encode(" ".join(words[start:] + 6 * words), add_special_tokens=False)
        length = (1, 2, 15, 16, 17, 32, LONGEST)[i] if i < 7 else int(LONGEST ** noise.random())
        assert len(ids) >= length
        prompts.append(ids[:length])
    return prompts


@pytest.fixture(scope="module")
def demo() -> Any:
    """The demo model from its file, its tokenizer, prompts, and the answers of transformers."""
    checkpoint = open_checkpoint("demo")
    twin = float_model(Qwen3MoeForCausalLM, Qwen3MoeConfig(**checkpoint.config()))
    weights = {name: checkpoint.decode(name, torch.float32) for name in checkpoint.names()}
    missing, surplus = twin.load_state_dict(weights, strict=False)
    twin.tie_weights()
    assert missing == ["lm_head.weight"] and not surplus and twin.config.tie_word_embeddings
    checkpoint.close()
    tokenizer = load_tokenizer("demo")
    prompts = make_texts(tokenizer)
    answers = GreedyAnswers(twin, prompts, sorted(tokenizer.eos_token_ids))
    return load_model("demo", rules=str(EXACT_RULES)), tokenizer, prompts, answers


def check_demo(demo: Any, count: int, budget: int, caching: bool, pages: int) -> None:
    model, tokenizer, prompts, answers = demo
    served = model.module, tokenizer, model.kv_layout(PAGE_SIZE), prompts[:count], answers
    check_parity(*served, budget=budget, caching=caching, pages=pages)


@pytest.mark.parametrize(("budget", "caching", "pages"), [(64, True, 46), (512, False, 2000)])
def test_the_demo_model_gives_transformers_tokens(demo: Any, budget: int, caching: bool, pages: int) -> None:
    check_demo(demo, FEW, budget, caching, pages)


@pytest.mark.parity
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pages", [46, 2000])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [16, 64, 512])
def test_the_demo_model_gives_transformers_tokens_in_the_whole_matrix(
    demo: Any, budget: int, caching: bool, pages: int
) -> None:
    check_demo(demo, REQUESTS, budget, caching, pages)
