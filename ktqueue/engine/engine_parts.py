"""The runner, token selector and cache of an engine: those for the CPU, or those for a device."""

from collections.abc import Sequence
from dataclasses import dataclass

from ktqueue.core.config import EngineConfig
from ktqueue.core.vocabulary import Vocabulary
from ktqueue.engine.draft_model import JOINED, MOST_OF_A_STEP, DraftModel, DraftSource
from ktqueue.engine.gpu.device_model import CapturesPrompts
from ktqueue.engine.gpu.graph_capture import GraphCapturer, RepeatedCall
from ktqueue.engine.gpu.graph_runner import MOST_CAPTURED_ROWS, GraphRunner, Progress, buckets_up_to
from ktqueue.engine.gpu.prompt_bucket import prompt_buckets_up_to
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
    draft: DraftSource | None = None,
) -> EngineParts:
    """Make the parts for the CPU if there is no attention `planner`, else those for `config.device`.

    The device may be a CPU too, for tests. Captured steps are then called again instead of replayed. `draft`: of the
    draft model, if the settings want one, on the same device. Raises ValueError for a GPU without a planner.
    """
    sizes = layout, config, num_pages
    if planner is not None:
        return _device_parts(model, vocabulary, *sizes, max_model_len, planner, progress, draft)
    if is_gpu(config.device):
        raise ValueError(f"an engine on {config.device} needs an attention planner")
    return _host_parts(model, vocabulary, *sizes, draft)


def _host_parts(
    model: Model,
    vocabulary: Vocabulary,
    layout: KVLayout,
    config: EngineConfig,
    num_pages: int,
    draft: DraftSource | None,
) -> EngineParts:
    selector = HostSelector(vocabulary.token_bytes, threads=config.threads or 1)
    draft_model = None
    if draft is not None:
        draft.keep_hidden(num_pages, config.device)
        passes = HostRunner(draft.model, vocabulary.size)
        draft_model = draft.make(passes, KVCache(draft.layout, num_pages), selector, config.step_tokens)
    return EngineParts(
        KVCache(layout, num_pages, slots=_slots(layout, config)),
        HostRunner(model, vocabulary.size),
        selector,
        may_draft=_may_draft(layout, config) and config.batch_invariant is not False,
        drafts_apart=bool(layout.linear),
        draft_model=draft_model,
    )


def _device_parts(
    model: Model,
    vocabulary: Vocabulary,
    layout: KVLayout,
    config: EngineConfig,
    num_pages: int,
    max_model_len: int,
    planner: AttentionPlanner,
    progress: Progress | None,
    draft: DraftSource | None,
) -> EngineParts:
    # It imports Triton: 0.3 s that a CPU need not wait.
    from ktqueue.engine.gpu.device_selector import DeviceSelector

    device = config.device

    def captured(
        model: Model,
        kv: KVCache,
        planner: AttentionPlanner,
        rows: int,
        progress: Progress | None = None,
        *,
        prompts: Sequence[int] = (),
        overlaps: bool = False,
    ) -> GraphRunner:
        """A runner whose decode steps of up to `rows` rows are captured, if the settings allow it. prompts: tokens of
        other captured steps."""
        return GraphRunner(
            model,
            vocabulary.size,
            kv,
            planner,
            GraphCapturer(device) if is_gpu(device) else RepeatedCall(),
            device=device,
            buckets=buckets_up_to(rows) if config.cuda_graphs else [],
            max_pages=-(-max_model_len // layout.page_size),
            prompts=prompts,
            progress=progress,
            overlaps=overlaps,
        )

    if draft is not None:
        draft.keep_hidden(num_pages + 1, device)
    kv = KVCache(layout, num_pages, device, slots=_slots(layout, config), scratch=True)
    overlaps = may_overlap(config, state_bytes=layout.state_bytes, original_length=layout.original_length)
    prompts = captured_prompts(config, model, layout)
    runner = captured(model, kv, planner, captured_rows(config), progress, prompts=prompts, overlaps=overlaps)
    selector = DeviceSelector(vocabulary.token_bytes, device)
    draft_model, graph_bytes = None, runner.graph_bytes
    if draft is not None:
        draft_kv = KVCache(draft.layout, num_pages, device, scratch=True)
        passes = captured(draft.model, draft_kv, draft.planner or planner, drafted_rows(config))
        draft_model = draft.make(passes, draft_kv, selector, config.step_tokens)
        graph_bytes += passes.graph_bytes
    return EngineParts(
        kv,
        runner,
        selector,
        graph_bytes,
        LEAST_JUMP,
        check_greedy=False,
        may_draft=_may_draft(layout, config),
        drafts_apart=True,
        draft_model=draft_model,
    )


def _slots(layout: KVLayout, config: EngineConfig) -> int:
    rows = min(config.rows, config.step_tokens)
    return slots_for(rows, drafts=config.drafts) if layout.linear else 0


def captured_steps(config: EngineConfig) -> int:
    """How many decode steps are captured on a device, with those of a draft model."""
    if not config.cuda_graphs:
        return 0
    passes = len(buckets_up_to(drafted_rows(config))) if config.speculation in ("model", "mtp") else 0
    return len(buckets_up_to(captured_rows(config))) + passes


def captured_prompts(config: EngineConfig, model: object, layout: KVLayout) -> list[int]:
    """Tokens of the steps with prompts that are captured for a model on a device, once that is prepared. None are with
    states of linear attention, and with indexers, whose choice depends on lengths."""
    if not config.cuda_graphs or layout.linear or layout.index or not isinstance(model, CapturesPrompts):
        return []
    return prompt_buckets_up_to(min(config.step_tokens, model.most_captured_tokens))


def drafted_rows(config: EngineConfig) -> int:
    """Rows of the largest captured pass of a draft model. The first pass has rows for several tokens of a sequence."""
    most = config.rows * (1 + JOINED) if config.speculation == "model" else config.rows
    return min(most, config.step_tokens, MOST_OF_A_STEP)


def captured_rows(config: EngineConfig) -> int:
    """Rows of the largest step that is captured on a device, where each draft is a row of its own."""
    rows = min(config.rows, config.step_tokens)
    drafts = min(MOST_OF_A_STEP, rows * config.max_draft_tokens) if config.drafts else 0
    return min(rows + drafts, config.step_tokens, MOST_CAPTURED_ROWS)


def may_overlap(config: EngineConfig, *, state_bytes: int, original_length: int) -> bool:
    """Whether steps may overlap, if the model's can: see Overlap. state_bytes, original_length: see KVLayout."""
    has_small_steps = config.interactive_share > 0 and config.interactive_step_seconds != 0
    return has_small_steps and not state_bytes and not original_length


def _may_draft(layout: KVLayout, config: EngineConfig) -> bool:
    """Whether an engine may verify drafts, if it computes a token alike in every batch.

    Angles of another length would be needed for drafts beyond that length.
    """
    return config.drafts and not layout.original_length
