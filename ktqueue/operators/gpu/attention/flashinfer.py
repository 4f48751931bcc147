"""FlashInfer's paged attention behind our planners. It compiles its kernels for the device when first used.

Eager steps use its prefill kernels for any mix of rows. Captured decode steps use them in their CUDA graph form, with
one wrapper per row bucket and window. Captured steps with prompts use kernels of ours, whose grid does not follow from
lengths. Plans are made from host arrays: lengths are never read back from the device, and all copies from pinned memory
are asynchronous.
"""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ktqueue.operators.gpu.attention.base import AttentionShape, SharedWorkspace
from ktqueue.operators.gpu.attention.page_lists import (
    PageLists,
    check_decode_step,
    one_page_each,
    page_lists,
    staged,
    views_of,
)
from ktqueue.operators.gpu.attention.triton import TritonPlanner, TritonPromptPlan
from ktqueue.operators.kv_cache import CacheScale, KVCache
from ktqueue.operators.step import ScoreOptions, StepContext

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
"""Types of queries. The cache may also be float8_e4m3fn."""


class Wrapper:
    """One of FlashInfer's wrappers, and an event for the copy of its last plan.

    A plan is written to the wrapper's pinned memory and copied from there without waiting, so the next plan must wait
    for that copy. One step later it is long finished; only plans that are made faster than steps run wait here.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, *arrays: torch.Tensor, **options: Any) -> None:
        """Call the `plan` of the wrapper."""
        self._copied.synchronize()
        self._wrapper.plan(*arrays, **options)
        self._copied.record()

    def run(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: CacheScale) -> torch.Tensor:
        """Attend: query [tokens, heads, head_dim] -> the same shape. A scale of values other than 1 is a launch."""
        query = query.contiguous()
        out = torch.empty_like(query)
        self._wrapper.run(query, (keys, values), k_scale=scale.key, v_scale=scale.value, out=out)
        return out


class FlashInferPlan:
    """Attends with planned wrappers, one for each sliding window (0: none) of the model."""

    def __init__(self, wrappers: dict[int, Wrapper], shape: AttentionShape) -> None:
        self._wrappers = wrappers
        self._planned = shape.scaling, shape.cap

    def attend(self, layer: int, query: torch.Tensor, kv: KVCache, options: ScoreOptions) -> torch.Tensor:
        """See AttentionPlan. Raises ValueError for sinks or a chunk, and for a window, scaling or cap that was not
        planned."""
        if options.sinks is not None or options.chunk:
            raise ValueError("FlashInfer's kernels have no sinks and no chunks")
        wrapper = self._wrappers.get(options.sliding_window)
        if wrapper is None or (options.scaling, options.cap) != self._planned:
            raise ValueError(
                f"attention was planned for windows {sorted(self._wrappers)} and scaling and cap {self._planned}, "
                f"not for {options.sliding_window} and {options.scaling, options.cap}"
            )
        return wrapper.run(query, kv.keys[layer], kv.values[layer], kv.layout.scale(layer))


class FlashInferDecodePlan(FlashInferPlan):
    """The plan of a row bucket. `pages`: device buffer for the page lists of all its rows, shared by the windows."""

    def __init__(
        self,
        wrappers: dict[int, Wrapper],
        shape: AttentionShape,
        pages: torch.Tensor,
        limits: tuple[int, int, int],
        options: dict[int, dict[str, Any]],
    ) -> None:
        super().__init__(wrappers, shape)
        self._pages = pages
        self._limits = limits
        self._options = options
        self._plan(one_page_each(limits[0]))

    def update(self, host: StepContext) -> None:
        """See DecodePlan."""
        check_decode_step(host, *self._limits)
        self._plan(page_lists(host, self._limits[2]))

    def _plan(self, lists: PageLists) -> None:
        arrays = [lists.starts, lists.last, lists.contexts, lists.pages]
        host, offsets = staged(arrays, self._pages.device)
        starts, last, contexts, pages = views_of(host, arrays, offsets)
        # Only the list of pages is long. The wrapper would wait for its copy from the host, but does not copy a list
        # that is already in its own buffer.
        page_list = self._pages[: len(pages)]
        page_list.copy_(pages, non_blocking=True)
        for window, wrapper in self._wrappers.items():
            wrapper.plan(starts, page_list, last, seq_lens=contexts, **self._options[window])


class FlashInferPlanner:
    """An AttentionPlanner over FlashInfer. Its first plan compiles kernels for half a minute and keeps them on disk.

    Raises RuntimeError if they cannot be compiled, ImportError if FlashInfer is not installed.
    """

    backend = "flashinfer"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape, layout = shape, shape.layout
        self._device = torch.device(shape.device)
        prepare_compiler(self._device)
        import flashinfer

        self._library = flashinfer
        self._processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._partial_results = SharedWorkspace(self._device)
        self._plan_bytes = 0
        common = {
            "num_qo_heads": shape.heads,
            "num_kv_heads": layout.kv_heads,
            "page_size": layout.page_size,
            "sm_scale": shape.scaling,
            "logits_soft_cap": shape.cap,
            "q_data_type": shape.dtype,
            "kv_data_type": layout.dtype,
            "o_data_type": shape.dtype,
            "non_blocking": True,
        }
        # window_left: how many keys before itself a token sees.
        self._options = {window: {**common, "window_left": window - 1 if window else -1} for window in shape.windows}
        tile = 128 if layout.head_dim < 256 else 64
        with torch.inference_mode(False):
            partial = self._partial_results.take(self._partial_bytes(self._most_parts(), tile))
            self._prefill = {window: Wrapper(self._prefill_wrapper(partial)) for window in shape.windows}

    @property
    def workspace_bytes(self) -> int:
        """See AttentionPlanner."""
        return self._partial_results.bytes + self._plan_bytes

    def plan(self, host: StepContext) -> FlashInferPlan:
        """See AttentionPlanner."""
        lists = page_lists(host, self._shape.layout.page_size)
        starts = host.query_starts.numpy()
        arrays = [starts, lists.starts, lists.pages, lists.last, lists.contexts]
        pinned, offsets = staged(arrays, self._device)
        queries, firsts, pages, last, contexts = views_of(pinned, arrays, offsets)
        for window, wrapper in self._prefill.items():
            wrapper.plan(
                queries,
                firsts,
                pages,
                last,
                head_dim_qk=self._shape.layout.head_dim,
                causal=True,
                seq_lens=contexts,
                max_token_per_sequence=int(np.diff(starts).max()),
                **self._options[window],
            )
        return FlashInferPlan(self._prefill, self._shape)

    def another(self) -> "FlashInferPlanner":
        """See AttentionPlanner."""
        return FlashInferPlanner(self._shape)

    def decode_plan(self, rows: int, max_pages: int) -> FlashInferDecodePlan:
        """See AttentionPlanner."""
        group = self._shape.heads // self._shape.layout.kv_heads
        tile = 16 if group <= 16 else 64 if group <= 64 else 128
        parts = max(self._most_parts(), -(-rows * group // tile) + rows - 1)
        with torch.inference_mode(False):
            partial = self._partial_results.take(self._partial_bytes(parts, tile))
            pages = torch.zeros(rows * max_pages, dtype=torch.int32, device=self._device)
            firsts = torch.zeros(rows + 1, dtype=torch.int32, device=self._device)
            last = torch.ones(rows, dtype=torch.int32, device=self._device)
            wrappers = {}
            for window in self._options:
                wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
                    partial,
                    kv_layout="NHD",
                    use_cuda_graph=True,
                    use_tensor_cores=True,
                    paged_kv_indptr_buffer=firsts,
                    paged_kv_indices_buffer=pages,
                    paged_kv_last_page_len_buffer=last,
                    backend="fa2",
                )
                # Three indices and a flag per part, two offsets per row. The default would be 8 MiB per wrapper.
                plan = torch.empty(16 * (parts + rows) + 4096, dtype=torch.uint8, device=self._device)
                wrapper.reset_workspace_buffer(partial, plan)
                self._plan_bytes += plan.nbytes
                wrappers[window] = Wrapper(wrapper)
            self._plan_bytes += firsts.nbytes + last.nbytes + pages.nbytes
            limits = rows, max_pages, self._shape.layout.page_size
            head_dim = {"head_dim": self._shape.layout.head_dim}
            options = {window: common | head_dim for window, common in self._options.items()}
            return FlashInferDecodePlan(wrappers, self._shape, pages, limits, options)

    def prompt_plan(self, rows: int, tokens: int, max_pages: int) -> TritonPromptPlan:
        """See AttentionPlanner."""
        plan = TritonPlanner(self._shape).prompt_plan(rows, tokens, max_pages)
        self._plan_bytes += plan.bytes
        return plan

    def _prefill_wrapper(self, partial: torch.Tensor) -> Any:
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(partial, kv_layout="NHD", backend="fa2")
        self._plan_bytes += 8 << 20  # allocated by the wrapper itself
        return wrapper

    def _most_parts(self) -> int:
        """Most parts of a step when FlashInfer splits its keys: two for each processor."""
        return 2 * self._processors // self._shape.layout.kv_heads

    def _partial_bytes(self, parts: int, tile: int) -> int:
        """Bytes of the float32 results of `parts` tiles of `tile` query rows and logs of their sums, for all heads."""
        return self._shape.heads * parts * tile * (self._shape.layout.head_dim + 1) * 4 + 4096


def prepare_compiler(device: torch.device) -> None:
    """Make FlashInfer compile for `device` only. Raises RuntimeError if a compiler is missing."""
    major, minor = torch.cuda.get_device_capability(device)
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}")  # FlashInfer adds the suffix that nvcc needs
    if find_spec("flashinfer_jit_cache"):
        return  # already compiled
    scripts = Path(sys.executable).parent
    if shutil.which("ninja") is None and (scripts / "ninja").is_file():
        os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    nvcc = shutil.which("nvcc") or any((Path(home) / "bin/nvcc").is_file() for home in [*homes, "/usr/local/cuda"])
    if not nvcc:
        raise RuntimeError(
            "FlashInfer compiles its kernels when first used, but nvcc is neither on PATH nor in CUDA_HOME"
        )
    if shutil.which("ninja") is None:
        raise RuntimeError("FlashInfer compiles its kernels with ninja, which is not on PATH")
