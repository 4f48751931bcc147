"""A model that is loaded once on a GPU, and measured under several settings."""

import argparse
import gc
from dataclasses import replace
from typing import Any

import torch

from benchmarks.command import command_line, integers
from ktqueue.bench.engine import prompts
from ktqueue.core.config import EngineConfig
from ktqueue.engine.draft_model import DraftSource
from ktqueue.operators.gpu.decoder import GpuDecoder
from ktqueue.operators.gpu.settings import Trials
from ktqueue.workers.startup.build import assemble, build, cache_dtype, compute_dtype
from ktqueue.workers.startup.draft_model import load_draft_model

PROMPT_TOKENS = 128
GIB = 1 << 30
MODEL = "synthetic:qwen3-30b-a3b:q4_k_m"


def gpu_command_line(description: str | None, rows: str) -> argparse.ArgumentParser:
    """A parser that knows `--model`, `--rows` and `--results`."""
    parser = command_line(description)
    parser.add_argument("--model", default=MODEL, help="a model that a worker accepts")
    parser.add_argument("--rows", type=integers, default=rows, help="rows that decode at once")
    return parser


class LoadedGpuModel:
    """The model, and one engine at a time."""

    def __init__(self, model: str, rows: int, cache_bytes: int, **settings: Any) -> None:
        self._config = EngineConfig(
            model=model,
            device="cuda",
            enable_prefix_caching=False,
            max_num_seqs=rows,
            kv_cache_bytes=cache_bytes,
            **settings,
        )
        self._built = build(self._config)
        self.engine = self._built.engine

    @property
    def decoder(self) -> GpuDecoder:
        """The model's one operator."""
        decoder = self._built.model.module
        if not isinstance(decoder, GpuDecoder):
            raise SystemExit(f"GpuDecoder is measured; the rules put {type(decoder).__name__} there")
        return decoder

    @property
    def expert_bytes(self) -> int:
        """GPU memory that all experts need."""
        return int(self.decoder.statistics()["expert_bytes"])

    def prompts(self, rows: int, tokens: int = PROMPT_TOKENS, seed: int = 1) -> list[list[int]]:
        """Prompts of random tokens."""
        return prompts(rows, tokens, self._built.tokenizer.size, seed=seed)

    def load_draft_model(self, name: str) -> DraftSource | None:
        """Load a model that drafts for this one."""
        config = replace(self._config, draft_model=name)
        dtype = compute_dtype(config)
        return load_draft_model(config, self._built.tokenizer, dtype, cache_dtype(config, dtype))

    def rebuild(self, trials: Trials | None = None, draft: DraftSource | None = None, **settings: Any) -> None:
        """Replace the engine by one with other settings than at first, and with the trials that are turned on.

        draft: what makes its drafts, if `speculation` is model. It serves one engine.
        """
        model, tokenizer = self._built.model, self._built.tokenizer
        self.engine.close()
        del self._built, self.engine  # frees the memory of its cache
        gc.collect()
        torch.cuda.empty_cache()
        if isinstance(model.module, GpuDecoder):
            model.module.trials = trials or Trials()
        self._built = assemble(replace(self._config, **settings), model, tokenizer, draft=draft)
        self.engine = self._built.engine
