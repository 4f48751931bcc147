"""Greedy answers of our engines compared with the logits of transformers or llama.cpp on the same model.

A token is equal if the other's logits, after the same tokens, are highest for it. If that holds for every token, the
other's own greedy answer is the same. A token whose logit is less than TIE below the highest is a tie.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from device_engine import on_device
from greedy_requests import make_prompts, serve

from ktqueue.core.config import EngineConfig
from ktqueue.core.request import SamplingParams
from ktqueue.engine.engine import Engine
from ktqueue.loading.load import LoadedModel, load_model
from ktqueue.loading.model_report import report_model
from ktqueue.workers.startup.build import build
from tests.served.families import VOCAB

TIE = 1e-4
NEW_TOKENS = 16
LONGEST = 160  # tokens of a prompt
LEAST_TOKENS = 5
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 48,
    "page_size": 16,
    "num_pages": 16,
    "threads": 1,
}
GPU_RULES = "- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n"
Scores = Callable[[list[int]], npt.NDArray[np.float32]]
"""The logits [tokens, vocab] of all positions of a prompt."""


def cpu_answers(model: Path, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
    """Answers of the engine that a worker builds with the rules `exact`, and what ran."""
    built = build(EngineConfig(model=str(model), rules="exact", **SETTINGS))
    return _answers(built.engine, built.model, prompts)


def gpu_answers(
    folder: Path, prompts: list[list[int]], device: str, dtype: torch.dtype = torch.float32, share: float = 0.0
) -> tuple[list[list[int]], dict[str, Any]]:
    """The same with GpuDecoder and the engine of a GPU. On the device `cpu`, its kernels run as their twins.

    `share` of the routed experts is in GPU memory.
    """
    rules = folder / "gpu.yaml"
    rules.write_text(GPU_RULES)
    movable = report_model(str(folder), rules=str(rules), device=device, dtype=dtype).movable_bytes
    config = EngineConfig(
        device=device,
        dtype="float32" if dtype == torch.float32 else "bfloat16",
        gpu_expert_memory_bytes=int(share * movable),
        **SETTINGS,
    )
    model = load_model(str(folder), rules=str(rules), device=device, dtype=dtype)
    return _answers(on_device(model, config), model, prompts)


def _answers(engine: Engine, model: LoadedModel, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
    """Raises AssertionError if the schedule had no chunks, no preemption or no reuse of a prefix."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    found = serve(engine, prompts, sampling)
    assert all(len(answer) == NEW_TOKENS for answer in found)
    stats = engine.stats()
    engine.close()
    assert stats.preemptions and stats.prefix_hits
    operators = sorted({replacement.op for replacement in model.plan.replacements})
    return found, {"operators": operators, "preemptions": stats.preemptions, "prefix_hits": stats.prefix_hits}


def prompts_of_families() -> list[list[int]]:
    """The 64 prompts that every family gets."""
    return make_prompts(VOCAB, LONGEST)


def transformers_scores(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Scores:
    """Logits of the model of a folder as transformers loads and runs it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model.to(torch.device(device))  # type: ignore[arg-type]

    def run(ids: list[int]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            found = model(torch.tensor([ids], device=device), output_router_logits=False, use_cache=False).logits[0]
        return np.asarray(found.float().cpu())

    return run


def compare(prompts: Sequence[list[int]], answers: Sequence[list[int]], scores: Scores) -> dict[str, Any]:
    """Count the tokens that are equal and those that tie, and state how far the worst of them is below the top.

    Raises AssertionError if the answers have few different tokens, because equality would prove little.
    """
    different = len({token for answer in answers for token in answer})
    assert different >= LEAST_TOKENS
    counts = {"different": different, "tokens": 0, "equal": 0, "ties": 0}
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = scores([*prompt, *answer[:-1]])[len(prompt) - 1 :].astype(np.float64)
        gaps = logits.max(-1) - logits[np.arange(len(answer)), answer]
        equal = logits.argmax(-1) == np.array(answer)
        counts["tokens"] += len(answer)
        counts["equal"] += int(equal.sum())
        counts["ties"] += int(((gaps < TIE) & ~equal).sum())
        worst = max(worst, float(gaps.max()))
    return {**counts, "worst_gap": worst}


def relative_difference(ours: Scores, theirs: Scores, windows: Sequence[list[int]]) -> float:
    """The largest difference of two logits, relative to the largest logit of its window."""
    pairs = ((ours(ids), theirs(ids)) for ids in windows)
    return max(float(np.abs(mine - other).max() / np.abs(other).max()) for mine, other in pairs)
