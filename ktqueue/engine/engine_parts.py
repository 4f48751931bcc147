"""The runner, token selector and cache of an engine: those for the CPU, or those for a device."""

from dataclasses import dataclass

from ktqueue.core.config import EngineConfig
from ktqueue.core.vocabulary import Vocabulary
from ktqueue.engine.draft_model import DraftModel, DraftSource
from ktqueue.engine.drafts import MOST_OF_A_STEP
from ktqueue.engine.gpu.graph_capture import GraphCapturer, RepeatedCall
from ktqueue.engine.gpu.graph_runner import GraphRunner, Progress, buckets_up_to
from ktqueue.engine.next_token_drafts import NextTokenSource
from ktqueue.engine.runner import HostRunner, Model, Runner
from ktqueue.engine.states import slots_for
from ktqueue.engine.token_selector import HostSelector, Selector
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.gpu.device import is_gpu
from ktqueue.operators.kv_cache import KVCache, KVLayout

LEAST_JUMP = 4  # on a GPU, where a step with several tokens of a row is neither prepared nor captured


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine that depend on the device.

    `graph_bytes`: device memory of captured steps. `least_jump`: fewer tokens that a grammar forces are not appended at
    once, but chosen one by one. `check_greedy`: see TokenMasks. `may_draft`: see `_may_draft`. `drafts_apart`: see
    BatchBuilder.
    """

    kv: KVCache
    runner: Runner
    selector: Selector
    graph_bytes: int = 0
    least_jump: int = 1
    check_greedy: bool = True
    may_draft: bool = False
    drafts_apart: bool = False
    draft_model: DraftModel | None = None

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of all caches."""
        self.kv.copy_page(source, target)
        if self.draft_model is not None:
            self.draft_model.copy_page(source, target)


def make_parts(
    model: Model,
    vocabulary: Vocabulary,
    layout: KVLayout,
    config: EngineConfig,
    num_pages: int,
    max_model_len: int,
    planner: AttentionPlanner | None,
    progress: Progress | None,
    draft: DraftSource | NextTokenSource | None = None,
) -> EngineParts:
    """Make the parts for the CPU if there is no attention `planner`, else those for `config.device`.

    The device may be a CPU too, for tests. Captured steps are then called again instead of replayed. `draft`: of the
    draft model, if the settings want one; on the CPU only. Raises ValueError for a GPU without a planner.
    """
    device = config.device
    on_gpu = is_gpu(device)
    rows = min(config.rows, config.step_tokens)
    slots = slots_for(layout, rows)
    if planner is None:
        if on_gpu:
            raise ValueError(f"an engine on {device} needs an attention planner")
        runner = HostRunner(model, vocabulary.size)
        selector = HostSelector(vocabulary.token_bytes, threads=config.threads or 1)
        cache = KVCache(layout, num_pages, slots=slots)
        may_draft = _may_draft(layout, config) and config.batch_invariant is not False
        draft_model = draft.make(vocabulary.size, num_pages, selector, config.step_tokens) if draft else None
        return EngineParts(cache, runner, selector, may_draft=may_draft, draft_model=draft_model)
    from ktqueue.engine.gpu.device_selector import (
        DeviceSelector,
    )  # which imports Triton: 0.3 s that a CPU need not wait

    kv = KVCache(layout, num_pages, device, slots=slots, scratch=True)
    graphs = GraphRunner(
        model,
        vocabulary.size,
        kv,
        planner,
        GraphCapturer(device) if on_gpu else RepeatedCall(),
        device=device,
        buckets=buckets_up_to(captured_rows(config)) if config.cuda_graphs else [],
        max_pages=-(-max_model_len // layout.page_size),
        progress=progress,
    )
    return EngineParts(
        kv,
        graphs,
        DeviceSelector(vocabulary.token_bytes, device),
        graphs.graph_bytes,
        LEAST_JUMP,
        check_greedy=False,
        may_draft=_may_draft(layout, config),
        drafts_apart=True,
    )


def captured_rows(config: EngineConfig) -> int:
    """Rows of the largest decode step on a device, where each draft is a row of its own."""
    rows = min(config.rows, config.step_tokens)
    drafts = min(MOST_OF_A_STEP, rows * config.max_draft_tokens) if config.speculation != "off" else 0
    return min(rows + drafts, config.step_tokens)


def _may_draft(layout: KVLayout, config: EngineConfig) -> bool:
    """Whether an engine may verify drafts, if it computes a token alike in every batch.

    What a wrong draft wrote must be overwritten: states cannot be. Angles of another length would be needed for drafts
    beyond it.
    """
    return config.speculation != "off" and not layout.linear and not layout.original_length
