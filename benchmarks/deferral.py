"""What deferred experts cost the demo model in quality: `python -m benchmarks.deferral TEXT`.

Windows of TEXT (it may be an .xz file) are fed token by token, one row each, to GpuDecoder on CPU tensors in float32,
without and with 1, 2 ... deferred experts of each token. So every token meets deferral, its keys and values too, and
nothing else differs. Each is a row's every token but the first, scored given those before it.
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.perplexity import read_text, text_facts
from benchmarks.results import RESULTS, write
from ktqueue.loading.load import load_model
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators import native
from ktqueue.operators.gpu.attention.torch import TorchPlanner
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.settings import GpuSettings
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext

RULES = "- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n"
PAGE_TOKENS = 16


class Rows:
    """So many rows that decode together from their first token on, each of at most `window` tokens."""

    def __init__(self, model: str, rows: int, window: int, deferred: int) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as rules:
            rules.write(RULES)
            rules.flush()
            loaded = load_model(model, rules=rules.name)
        decoder = loaded.module
        assert isinstance(decoder, GpuDecoder)
        decoder.prepare_device(GpuSettings(max_tokens=rows, deferred_experts=deferred))
        self.experts_per_token = loaded.experts_per_token
        self._decoder = decoder
        pages = -(-window // PAGE_TOKENS)
        self._kv = KVCache(loaded.kv_layout(PAGE_TOKENS), rows * pages)
        self._pages = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
        self._starts = torch.arange(rows + 1, dtype=torch.int32)
        self._planner = TorchPlanner(PAGE_TOKENS)
        self._fed = 0

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """The next token of each row, [rows] int64 -> what follows it, log-probabilities [rows, vocab] float64."""
        at, rows = self._fed, len(ids)
        self._fed += 1
        contexts = torch.full((rows,), self._fed, dtype=torch.int32)
        slots = self._pages[:, at // PAGE_TOKENS].long() * PAGE_TOKENS + at % PAGE_TOKENS
        host = StepContext(self._starts, contexts, self._pages, slots, self._kv)
        step = StepContext(self._starts, contexts, self._pages, slots, self._kv, attention=self._planner.plan(host))
        with torch.inference_mode():
            logits = self._decoder(
                input_ids=ids[None],
                position_ids=torch.full((1, rows), at),
                logits_to_keep=torch.arange(rows),
                step=step,
            ).logits[0]
        self._decoder.after_step()
        return torch.log_softmax(logits.double(), -1)


def compare(model: str, windows: torch.Tensor) -> tuple[int, list[dict[str, float]]]:
    """windows: [rows, tokens] int64. Experts of a token, and figures for each number of deferred ones from 0 on."""
    rows, window = windows.shape
    runs = [Rows(model, rows, window, 0)]
    most = runs[0].experts_per_token
    runs += [Rows(model, rows, window, deferred) for deferred in range(1, most)]
    loss, divergence, same = (torch.zeros(most, dtype=torch.float64) for _ in range(3))
    for at in range(window - 1):
        told = [run.feed(windows[:, at]) for run in runs]
        true, following = told[0], windows[:, at + 1, None]
        for index, one in enumerate(told):
            loss[index] -= one.gather(1, following).sum()
            divergence[index] += (true.exp() * (true - one)).sum()
            same[index] += (one.argmax(-1) == true.argmax(-1)).sum()
    scored = rows * (window - 1)
    return most, [
        {
            "deferred": deferred,
            "perplexity": math.exp(loss[deferred] / scored),
            "mean_divergence": float(divergence[deferred]) / scored,
            "same_token": float(same[deferred]) / scored,
        }
        for deferred in range(most)
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--window", type=int, default=256, help="tokens")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    native.set_threads(given.threads)
    raw = read_text(given.text)
    wanted = given.windows * given.window
    ids = load_tokenizer(given.model).encode(raw.decode()[: 16 * wanted])[:wanted]
    if len(ids) < wanted:
        raise SystemExit(f"{given.text} is too short for {given.windows} windows")
    experts, figures = compare(given.model, torch.tensor(ids).view(given.windows, given.window))
    result: dict[str, Any] = {
        "model": given.model,
        "text": text_facts(given.text, raw),
        "window": given.window,
        "windows": given.windows,
        "experts_per_token": experts,
        "figures": figures,
    }
    write(given.results / "deferral.json", result)


if __name__ == "__main__":
    main()
