"""The engine of a GPU on any device: on the CPU its operators run as their twins, and no memory is measured."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from endless_vocabulary import NoEnd

from ktqueue.core.config import EngineConfig
from ktqueue.engine.draft_model import DraftSource
from ktqueue.engine.engine import Engine
from ktqueue.loading.load import LoadedModel
from ktqueue.workers.startup.build import cache_dtype
from ktqueue.workers.startup.gpu_memory import CudaMemory, DeviceMemory, prepare_gpu


class Plenty:
    """Memory that never runs out, for tests on CPU tensors."""

    total = 4 << 30

    def used(self) -> int:
        return 1 << 20

    def reset_peak(self) -> None:
        pass

    def peak(self) -> int:
        return 1 << 20


def on_device(model: LoadedModel, config: EngineConfig, draft: DraftSource | None = None) -> Engine:
    """An engine with the parts of a GPU, on any device. `draft`: see make_parts."""
    memory: DeviceMemory = CudaMemory(config.device) if config.device == "cuda" else Plenty()
    layout = model.kv_layout(config.page_size, cache_dtype(config, model.dtype))
    gpu = prepare_gpu(model, layout, config, memory, draft)
    graphs = gpu.cuda_graphs if config.device == "cuda" else config.cuda_graphs
    vocabulary = NoEnd(model.card_facts.vocab_size)
    settled = replace(config, cuda_graphs=graphs)
    sizes = gpu.plan.pages, 512
    return Engine(model.module, vocabulary, layout, settled, *sizes, planner=gpu.planner, draft=draft)


def few_on_the_cpu(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases of a test: `cases` on tensors of the CPU, and all combinations of their values on a GPU."""
    kinds = [list(dict.fromkeys(values)) for values in zip(*cases, strict=True)]
    on_gpu = [pytest.param("cuda", *case, marks=pytest.mark.gpu) for case in itertools.product(*kinds)]
    return [("cpu", *case) for case in cases] + on_gpu
