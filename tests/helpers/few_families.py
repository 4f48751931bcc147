"""The few of all families whose layers together have every feature, for tests of what each feature does alone."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from decoder_families import FAMILIES
from latent_families import LATENT_FAMILIES

EVERY = (*FAMILIES, *LATENT_FAMILIES)
FEW = (
    "qwen2_moe", "qwen3_next with dense layers", "olmoe", "granite_swa", "gemma2", "gemma3", "gemma4 with experts",
    "phi3 with longrope", "phimoe", "hunyuan_v1_moe", "llama4", "gpt_oss", "mimo_v2_flash", "step3p5", "laguna",
    "laguna with a gate for each number", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "mistral4",
)  # fmt: skip
SIZES = (".hidden", ".vocabulary", ".positions", ".experts", ".name")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def features(facts: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """What DecoderFacts say: of each number whether it is 0, 1 or another, of each name whether there is one."""
    if is_dataclass(facts):
        for part in fields(facts):
            yield from features(getattr(facts, part.name), f"{field}.{part.name}")
    elif isinstance(facts, tuple) and facts:
        for one in facts:
            yield from features(one, field)
    elif field.endswith(".activation"):
        yield field, facts
    elif not field.endswith(SIZES):
        is_number = isinstance(facts, int | float) and facts not in (0, 1)
        yield field, "another" if is_number else int(bool(facts))


def on_each_device(few: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Cases of a test with their device: `few` on tensors of the CPU, `every` one on a GPU."""
    rows = [[(case if isinstance(case, tuple) else (case,)) for case in cases] for cases in (few, every)]
    on_gpu = [pytest.param(*case, "cuda", marks=[pytest.mark.gpu, NO_GPU]) for case in rows[1]]
    return [*((*case, "cpu") for case in rows[0]), *on_gpu]
