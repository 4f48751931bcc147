"""Greedy output equals transformers.generate token for token, whatever the engine does on the way.

64 requests arrive at random steps with prompts of 1 to 700 tokens, in steps of at most 16, 64 and
512 tokens, with and without prefix reuse, and with so few pages that sequences are preempted.
"""

import copy
import random

import pytest
import torch
from transformers import AttentionInterface, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.operators import attention
from ktqueue.operators.kv_cache import KVLayout

REQUESTS = 64
NEW_TOKENS = 24
LONGEST = 700
PAGE_SIZE = 16


class NoEnd:
    """A vocabulary without an end token; texts don't matter here."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, size: int) -> None:
        self.size = size

    def token_bytes(self, token_id: int) -> bytes:
        return b"."


def make_prompts(vocab: int) -> list[list[int]]:
    """64 prompts of 1 to 700 tokens; every third begins with a part of an earlier one."""
    noise = random.Random(64)
    prompts: list[list[int]] = []
    for i in range(REQUESTS):
        length = (1, 2, 15, 16, 17, 32, LONGEST)[i] if i < 7 else int(LONGEST ** noise.random())
        head = prompts[noise.randrange(i)][:length] if i % 3 == 2 else []
        prompts.append(head + [noise.randrange(vocab) for _ in range(length - len(head))])
    return prompts


def answers_of(model: torch.nn.Module, prompts: list[list[int]], end: int | None) -> list[list[int]]:
    """What transformers generates for each prompt by itself."""
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=end,
                pad_token_id=0,
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


def serve(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    """The engine's answers when the prompts arrive at random steps."""
    noise = random.Random(1)
    arrivals = sorted((noise.randrange(60), i) for i in range(len(prompts)))
    found: list[list[int]] = [[] for _ in prompts]
    step = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= step:
            i = arrivals.pop(0)[1]
            engine.add(str(i), prompts[i], sampling)
        for one in engine.step():
            assert one.error is None
            found[int(one.request_id)] += one.token_ids
        step += 1
    engine.check()
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages
    return found


@pytest.fixture(scope="module")
def tiny():
    """A random Qwen3-MoE in float32, its paged twin with the same weights, prompts and transformers' answers."""
    config = Qwen3MoeConfig(
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
    model = Qwen3MoeForCausalLM(config).eval().float()
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    paged = copy.deepcopy(model)
    paged.set_attn_implementation(attention.NAME)
    prompts = make_prompts(config.vocab_size)
    layout = KVLayout(layers=2, kv_heads=2, head_dim=16, page_size=PAGE_SIZE, dtype=torch.float32)
    return paged, NoEnd(config.vocab_size), layout, prompts, answers_of(model, prompts, None)


@pytest.mark.parametrize("pages", [46, 2000])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [16, 64, 512])
def test_tiny_random_model(tiny, budget, caching, pages):
    model, vocabulary, layout, prompts, answers = tiny
    config = EngineConfig(
        max_num_seqs=32, max_num_batched_tokens=budget, enable_prefix_caching=caching, page_size=PAGE_SIZE
    )
    engine = Engine(model, vocabulary, layout, config, pages, 1024)
    found = serve(engine, prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
    assert (engine.stats().preemptions > 0) == (pages == 46)
    assert (engine.stats().prefix_hits > 0) == caching
    assert found == answers
