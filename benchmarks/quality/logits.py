"""Logits of one file, all positions of a window of tokens, from three sources: our engine's model, llama.cpp, and the
float twin: transformers in float32 on the file's weights, dequantised."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers.initialization import no_init_weights

from benchmarks.peer import start_llama
from ktqueue.core.config import EngineConfig
from ktqueue.loading.load import open_checkpoint
from ktqueue.loading.skeleton import build_config
from ktqueue.operators.kv_cache import KVCache
from ktqueue.operators.step import StepContext
from ktqueue.workers.startup.build import build

Logits = npt.NDArray[np.float32]  # [tokens, vocab]
Source = Callable[[list[int]], Logits]


def ours(path: Path, threads: int, rules: str | None = None) -> Source:
    """The model as a worker builds it, each window as one prefill row."""
    built = build(EngineConfig(model=str(path), threads=threads, rules=rules))
    layout = built.model.kv_layout(built.config.page_size)
    slots = 1 if layout.linear else 0

    def run(ids: list[int]) -> Logits:
        count, pages = len(ids), -(-len(ids) // layout.page_size)
        offset = layout.original_length if count > layout.original_length else 0
        step = StepContext(
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            context_lengths=torch.tensor([count], dtype=torch.int32),
            page_table=torch.arange(pages, dtype=torch.int32)[None],
            slot_mapping=torch.arange(count),
            kv=KVCache(layout, pages, slots=slots),
            state_sources=torch.zeros(slots, dtype=torch.int32),
            state_targets=torch.zeros(slots, dtype=torch.int32),
        )
        with torch.inference_mode():
            logits = built.model.module(
                input_ids=torch.tensor([ids]),
                position_ids=torch.arange(offset, offset + count)[None],
                use_cache=False,
                logits_to_keep=torch.arange(count),
                step=step,
            ).logits[0]
        return np.asarray(logits.float())

    return run


def twin(path: Path) -> Source:
    """transformers' own model and attention, its weights as the file's blocks decode to."""
    checkpoint = open_checkpoint(str(path))
    config = build_config(checkpoint.config(), checkpoint.path)
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    weights = {name: checkpoint.decode(name, torch.float32) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if unexpected or set(missing) - set(model.all_tied_weights_keys):
        raise SystemExit(f"{path}: the twin lacks {missing} and does not know {unexpected}")
    model.eval().requires_grad_(False)

    def run(ids: list[int]) -> Logits:
        with torch.inference_mode():
            return np.asarray(model(torch.tensor([ids])).logits[0])

    return run


@contextmanager
def llama(python: str, path: Path, threads: int, *, repack: bool = True, exact: bool = False) -> Iterator[Source]:
    """llama.cpp as it is measured, in a process of its own. exact: see start_llama.

    Raises RuntimeError if it cannot load the file.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        start_llama(python, path, threads, 1, repack=repack, exact=exact) as process,
    ):
        process.hear()
        target = Path(folder) / "logits.npy"

        def run(ids: list[int]) -> Logits:
            process.ask("score", ids=ids, path=str(target))
            logits: Logits = np.load(target)
            return logits

        yield run
