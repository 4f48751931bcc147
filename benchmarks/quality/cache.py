"""Perplexity with keys and values in float8: `python -m benchmarks.quality.cache TEXT [--model M] [--device cuda]`.

Each window is one prompt, computed by GpuDecoder; all but its first token are scored. `float8` is the cache of
`--kv-cache-dtype fp8`. Other ways have other scales, by which keys and values are divided when they are stored. A scale
for each token and head is made up: before a layer attends, its keys and values are rounded in these units. On a CPU,
torch computes attention over the cache. TEXT may be an .xz file. A model with random weights has random tokens, and no
perplexity that says something.
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks import machine
from benchmarks.command import command_line
from benchmarks.quality.scored_texts import Sums, Text
from benchmarks.results import write
from ktqueue.loading.load import LoadedModel, load_model
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators import native
from ktqueue.operators.gpu.attention.backends import make_planner
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.kv_cache import CacheScale, KVCache
from ktqueue.operators.step import AttentionPlan, ScoreOptions, StepContext

FLOAT8 = torch.float8_e4m3fn
MOST, LEAST = torch.finfo(FLOAT8).max, torch.finfo(FLOAT8).smallest_normal
RULES = "- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n"
SHIFTS = {"float8": 1.0, "float8, 1/256 of its scales": 1 / 256, "float8, 256 times its scales": 256.0}
"""Factors of the scales of the cache."""
ROUNDED = "float8, a scale for each token and head"


@dataclass(frozen=True, slots=True)
class RoundedPlan:
    """Attends over keys and values of `tokens` tokens that are rounded first, each head of a token by itself."""

    plan: AttentionPlan
    tokens: int

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """See AttentionPlan. Rounding again changes nothing."""
        for cache in (kv.keys,) if kv.layout.latent is not None else (kv.keys, kv.values):
            states = cache[layer].flatten(0, 1)[: self.tokens]
            scale = (states.float().abs().amax(-1, keepdim=True) / MOST).clamp(min=1e-20)
            states.copy_((states.float() / scale).clamp(-MOST, MOST).to(FLOAT8).float() * scale)
        return self.plan.attend(layer, query, kv, options)


class Measured:
    """A model, and its logits of a window of tokens under each way to keep keys and values."""

    def __init__(self, name: str, device: str, window: int) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as rules:
            rules.write(RULES)
            rules.flush()
            dtype = torch.float32 if device == "cpu" else torch.bfloat16
            self.model: LoadedModel = load_model(name, rules=rules.name, device=device, dtype=dtype)
        decoder = self.model.module
        assert isinstance(decoder, GpuDecoder)
        self.decoder, self.device, self.window = decoder, device, window
        decoder.prepare_device(GpuSettings(max_tokens=window, expert_memory_bytes=1 << 40 if device != "cpu" else 0))
        self.layout = self.model.kv_layout(16)
        self.largest, self.tiny, self.numbers = 0.0, 0, 0

    def logits(self, ids: list[int], way: str) -> torch.Tensor:
        """[tokens, vocabulary], log probabilities."""
        facts, count = self.decoder.facts, len(ids)
        layout = self.layout
        if way in SHIFTS:
            layout = self.model.kv_layout(16, FLOAT8)
            scales = [layout.scale(layer) for layer in range(layout.layers)]
            scales = [CacheScale(scale.key * SHIFTS[way], scale.value * SHIFTS[way]) for scale in scales]
            layout = replace(layout, scales=tuple(scales))
        planner = make_planner(
            layout, heads=facts.heads, scaling=facts.scaling, device=self.device, dtype=self.layout.dtype,
            windows=[layer.sliding_window for layer in facts.layers],
        )  # fmt: skip
        kv = KVCache(layout, -(-count // layout.page_size), self.device)
        host = StepContext(
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            context_lengths=torch.tensor([count], dtype=torch.int32),
            page_table=torch.arange(kv.pages, dtype=torch.int32)[None],
            slot_mapping=torch.arange(count),
            kv=kv,
        )
        plan: AttentionPlan = planner.plan(host)
        if way == ROUNDED:
            plan = RoundedPlan(plan, count)
        tensors = {
            name: getattr(host, name).to(self.device)
            for name in ("query_starts", "context_lengths", "page_table", "slot_mapping")
        }
        every = torch.arange(count, device=self.device)
        with torch.inference_mode():
            output = self.decoder(
                input_ids=torch.tensor([ids], device=self.device),
                position_ids=every[None],
                logits_to_keep=every,
                step=replace(host, **tensors, attention=plan),
            )
        if way == "as computed":
            self._note(kv, count)
        return torch.log_softmax(output.logits[0].float(), -1)

    def _note(self, kv: KVCache, count: int) -> None:
        for cache in (kv.keys,) if kv.layout.latent is not None else (kv.keys, kv.values):
            for states in cache:
                sizes = states.flatten(0, 1)[:count].float().abs()
                self.largest = max(self.largest, float(sizes.max()))
                self.tiny += int((sizes < LEAST).sum())
                self.numbers += sizes.numel()


def compare(measured: Measured, windows: list[list[int]]) -> list[dict[str, Any]]:
    """Figures of each way, beside the cache as it is computed."""
    sums = {way: Sums() for way in ("as computed", *SHIFTS, ROUNDED)}
    for number, ids in enumerate(windows):
        expected = torch.empty(0)
        for way, total in sums.items():
            found = measured.logits(ids, way)[:-1]
            expected = found if way == "as computed" else expected
            total.add(found, expected, torch.tensor(ids[1:], device=found.device))
        sys.stderr.write(f"{number + 1} of {len(windows)} windows\n")
    usual = sums["as computed"].perplexity
    return [{"keys_and_values": way, **total.figure(usual)} for way, total in sums.items()]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--window", type=int, default=512, help="tokens")
    arguments = parser.parse_args()
    native.set_threads()
    scored = Text.read(arguments.text)
    count, window = arguments.windows, arguments.window
    measured = Measured(arguments.model, arguments.device, window)
    if arguments.model.startswith("synthetic:"):
        random, vocabulary = Random(1), measured.decoder.facts.vocabulary
        windows = [[random.randrange(vocabulary) for _ in range(window)] for _ in range(count)]
        source = "Weights and tokens are random."
    else:
        windows = scored.windows(load_tokenizer(arguments.model).encode, count, window)
        source = f"Text: {scored} from its beginning."
    figures = compare(measured, windows)
    name, facts = arguments.model.replace(":", "-"), machine.facts()
    float8 = measured.model.kv_layout(16, FLOAT8)
    unscaled = sum(number == 1 for layer in range(float8.layers) for number in float8.scale(layer))
    text = (
        f"{count} windows of {window} tokens, each one prompt; all but a window's first token scored. {source} KL "
        f"divergence and likeliest token: against the cache as computed. The largest key or value is "
        f"{measured.largest:.1f}, and {measured.tiny / measured.numbers:.2%} are below 2^-6, where float8_e4m3fn has "
        f"fewer bits. Of {2 * measured.layout.layers} scales {unscaled} are 1. +-: the standard error. "
        f"GpuDecoder on {arguments.device}; commit {facts['commit']}, {facts['taken']}."
    )
    columns = {
        "keys and values": "{keys_and_values}",
        "perplexity": "{perplexity:.3f}",
        "against as computed": "{change:+.2f}%",
        "+-": "{error:.2f}%",
        "KL": "{kl:.4f}",
        "same token": "{same:.1f}%",
    }
    section = {"title": f"A cache in float8: {arguments.model}", "text": text, "words": 1, "columns": columns}
    result = {"section": section, "figures": figures}
    write(arguments.results / f"cache-{name}-{arguments.device}.json", result, digits=6)


if __name__ == "__main__":
    main()
