"""A vocabulary of byte strings and a model whose next token is a hash of everything in its cache."""

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ktqueue.answers.grammar import GrammarCompiler, Matcher
from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import ErrorInfo
from ktqueue.core.events import FinishReason, PositionLogprobs, Usage
from ktqueue.engine.draft_costs import DraftCosts
from ktqueue.engine.draft_model import DraftSource
from ktqueue.engine.engine import Engine
from ktqueue.engine.engine_parts import EngineParts, make_parts
from ktqueue.engine.outputs import SequenceOutput
from ktqueue.engine.scheduler import MAX_PROMPT_ROWS
from ktqueue.engine.step_costs import StepCosts
from ktqueue.operators.gpu.attention.torch import TorchPlanner
from ktqueue.operators.kv_cache import KVLayout
from ktqueue.operators.step import StepContext

VOCAB = 97
EOS = 96


class ByteVocabulary:
    """Maps ids to byte strings. The last id ends a text and has no bytes."""

    def __init__(self, pieces: Sequence[bytes] | None = None) -> None:
        self.pieces = list(pieces) if pieces is not None else [bytes([33 + i]) for i in range(VOCAB - 1)] + [b""]

    @property
    def size(self) -> int:
        return len(self.pieces)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({len(self.pieces) - 1})

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    special_token_bytes = token_bytes


def next_scores(context: Sequence[int], vocab: int = VOCAB) -> np.ndarray:
    """Logits [vocab] as a function of the whole context. The end token never has the highest."""
    seed = 0
    for token in context:
        seed = (seed * 1_000_003 + int(token) + 1) % (2**61 - 1)
    return _drawn_scores(seed, vocab).copy()


@lru_cache(20_000)  # runs that are compared ask for the same
def _drawn_scores(seed: int, vocab: int) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * 3
    scores[vocab - 1] = -20.0
    return scores


class CacheModel:
    """Writes token ids through the slot mapping and reads each row's context back through its page table.

    A page that is wrong, lost or overwritten changes the output. Contexts for which `poison` is true get NaN logits.
    Rows that pad a step are not counted, and must write only to the scratch page.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []  # rows, tokens
        self.computed_tokens = 0
        self.poison: Callable[[Sequence[int]], bool] = lambda context: False
        self.scores: Callable[[Sequence[int]], np.ndarray] = next_scores

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool,
        logits_to_keep: torch.Tensor,
        step: StepContext,
    ) -> Any:
        assert use_cache is False
        tokens = input_ids.shape[1]
        starts, lengths = step.query_starts.tolist(), step.context_lengths.tolist()
        live = tokens if step.live_tokens is None else int(step.live_tokens)
        assert tokens == position_ids.shape[1] == len(step.slot_mapping)
        assert starts[0] == 0 and starts[-1] in (live, tokens)  # padding tokens of a step with prompts have no row
        page_size = step.kv.layout.page_size
        slots = step.slot_mapping.tolist()
        assert len(set(slots[:live])) == live, "two tokens share a slot"
        assert all(slot // page_size != step.kv.scratch_page for slot in slots[:live])
        assert all(slot // page_size == step.kv.scratch_page for slot in slots[live:])
        rows_live = sum(first < min(last, live) for first, last in itertools.pairwise(starts))
        assert not step.page_table[rows_live:, 1:].any(), "a padding row has pages of a row before"
        self.steps.append((rows_live, live))
        self.computed_tokens += live
        step.kv.write(0, step.slot_mapping, input_ids[0].view(-1, 1, 1).float(), position_ids[0].view(-1, 1, 1).float())
        rows = []
        scored, positions = logits_to_keep.tolist(), position_ids[0].tolist()
        page_table, keys, values = (part.numpy() for part in (step.page_table, step.kv.keys[0], step.kv.values[0]))
        for row, length in enumerate(lengths):
            chunk = starts[row + 1] - starts[row]
            assert positions[starts[row] : starts[row + 1]] == list(range(length - chunk, length))
            pages = page_table[row, : -(-length // page_size)]
            context = keys[pages].ravel()[:length].astype(int).tolist()
            assert values[pages].ravel()[:length].tolist() == list(range(length))
            for token in (token for token in scored if starts[row] <= token < starts[row + 1]):
                known = context[: length - (starts[row + 1] - 1 - token)]
                rows.append(np.full(VOCAB, np.nan, np.float32) if self.poison(known) else self.scores(known))
        assert len(rows) == len(scored) and scored == sorted(scored)
        return SimpleNamespace(logits=torch.tensor(np.array(rows, np.float32)).view(1, len(rows), VOCAB))


class Result:
    """All outputs of one choice, added up."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[PositionLogprobs] = []
        self.prompt_logprobs: list[PositionLogprobs | None] = []
        self.finish_reason: FinishReason | None = None
        self.error: ErrorInfo | None = None
        self.usage: Usage | None = None
        self.outputs: list[SequenceOutput] = []

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None


def gather(results: dict[tuple[str, int], Result], outputs: Sequence[SequenceOutput]) -> None:
    """Add the outputs of a step to the results, and assert that nothing follows an end."""
    for output in outputs:
        result = results.setdefault((output.request_id, output.index), Result())
        assert not result.ended or (output.request_done and not output.token_ids), "output after the end"
        result.outputs.append(output)
        result.token_ids += output.token_ids
        result.text += output.text
        result.logprobs += output.logprobs
        result.prompt_logprobs += output.prompt_logprobs
        result.finish_reason = output.finish_reason or result.finish_reason
        result.error = output.error or result.error
        result.usage = output.usage or result.usage
        assert (output.usage is not None) == output.request_done


@pytest.fixture
def vocabulary() -> ByteVocabulary:
    return ByteVocabulary()


@pytest.fixture(scope="session")
def compile_grammar() -> Callable[[str], Matcher]:
    """Compile a grammar for the vocabulary of single characters."""
    vocabulary = ByteVocabulary()
    ids = {vocabulary.token_bytes(token_id): token_id for token_id in range(vocabulary.size)}
    return GrammarCompiler(vocabulary, lambda text: [ids[bytes([byte])] for byte in text.encode()]).compile


@pytest.fixture
def make_vocabulary() -> type[ByteVocabulary]:
    return ByteVocabulary


@pytest.fixture
def model() -> CacheModel:
    return CacheModel()


@pytest.fixture
def make_model() -> type[CacheModel]:
    return CacheModel


@pytest.fixture
def scores() -> Callable[..., np.ndarray]:
    return next_scores


@pytest.fixture
def greedy() -> Callable[[Sequence[int], int], list[int]]:
    """The greedy continuation of a prompt, computed without any cache."""

    def go(prompt: Sequence[int], count: int) -> list[int]:
        context = list(prompt)
        for _ in range(count):
            context.append(int(np.argmax(next_scores(context))))
        return context[len(prompt) :]

    return go


@pytest.fixture
def parts() -> str:
    """Whether the engine has the parts of the host or those of a device, which is the CPU here."""
    return "host"


@pytest.fixture
def make_engine(parts: str) -> Callable[..., Engine]:
    """Make an engine over a CacheModel: `make_engine(model, vocabulary, num_pages=..., **EngineConfig fields)`."""

    def make(
        model: Any,
        vocabulary: Any,
        *,
        num_pages: int = 64,
        max_model_len: int = 128,
        page_size: int = 4,
        clock: Callable[[], float] = lambda: 0.0,
        change_parts: Callable[[EngineParts], EngineParts] = lambda parts: parts,
        max_prompt_rows: int = MAX_PROMPT_ROWS,
        draft: Any = None,
        draft_length: int = 0,
        auto_rows: bool = False,
        **settings: Any,
    ) -> Engine:
        layout = KVLayout(layers=1, kv_heads=1, head_dim=1, page_size=page_size, dtype=torch.float32)
        settings.setdefault(
            "interactive_step_ms", 0
        )  # else the rows of a step would depend on the time that steps take
        config = EngineConfig(page_size=page_size, **settings)
        planner = TorchPlanner(page_size) if parts == "device" else None
        source = DraftSource(draft, layout, draft_length or max_model_len) if draft else None
        sizes = num_pages, max_model_len
        made = change_parts(make_parts(model, vocabulary, layout, config, *sizes, planner, None, source))
        return Engine(
            model,
            vocabulary,
            layout,
            config,
            num_pages,
            max_model_len,
            parts=made,
            clock=clock,
            max_prompt_rows=max_prompt_rows,
            auto_rows=auto_rows,
        )

    return make


@pytest.fixture
def make_crowded(make_model: Any, vocabulary: Any, make_engine: Callable[..., Engine]) -> Any:
    """Make an engine for a workload. Its model gives NaN logits for some contexts."""

    def make(seed: Any, pages: Any, *, model: Any = None, **more: Any) -> Any:
        model = model or make_model()
        model.poison = lambda context: len(context) > 9 and context[-1] in (9 + seed, 50 + seed)
        return make_engine(
            model,
            vocabulary,
            num_pages=pages,
            max_model_len=60,
            max_num_seqs=7,
            cuda_graphs=seed % 3 < 2,
            enable_prefix_caching=seed % 2 == 0,
            **{"max_num_batched_tokens": 16, **more},
        )

    return make


@pytest.fixture
def run() -> Callable[..., dict[tuple[str, int], Result]]:
    """Step an engine until it has no work. Returns the results by (request id, index)."""

    def go(engine: Engine, *, limit: int = 10_000) -> dict[tuple[str, int], Result]:
        results: dict[tuple[str, int], Result] = {}
        for _ in range(limit):
            if not engine.has_work:
                break
            gather(results, engine.step())
            engine.check()
        assert not engine.has_work, "the engine never finished"
        stats = engine.stats()
        assert stats.free_pages == stats.total_pages and stats.running == stats.waiting == 0
        return results

    return go


@pytest.fixture
def answered(run: Callable[..., dict[tuple[str, int], Result]]) -> Callable[[Engine], dict[str, list[int]]]:
    """Step an engine until it has no work. Returns the tokens of each request, none of which may fail."""

    def go(engine: Engine) -> dict[str, list[int]]:
        results = run(engine)
        assert all(result.error is None for result in results.values())
        return {request: result.token_ids for (request, _), result in results.items()}

    return go


@pytest.fixture
def timeless_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of drafts do not know how long steps really take, so a slow moment stops no drafts."""
    learn = DraftCosts.learn

    def learn_no_time(
        self: DraftCosts, tokens: int, drafted: int, accepted: int, _: float, between: float | None, **options: Any
    ) -> None:
        timeless = {name: 0.0 for name in options if name in ("making", "reading")}
        learn(self, tokens, drafted, accepted, 0.0, None if between is None else 0.0, **options | timeless)

    monkeypatch.setattr(DraftCosts, "learn", learn_no_time)


@pytest.fixture
def any_chance(timeless_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tokens be drafted that are hardly ever right."""
    monkeypatch.setattr("ktqueue.engine.lookup.LEAST_CHANCE", 0.0)
    monkeypatch.setattr("ktqueue.engine.draft_costs.LEAST_GAIN", 1.0)


@pytest.fixture
def free_drafts(any_chance: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps of all sizes cost the same, so that there are as many drafts as possible."""
    monkeypatch.setattr(StepCosts, "seconds", lambda *_: 1.0)


@pytest.fixture
def by_decoder(tmp_path: Path) -> str:
    """A file of rules that select GpuDecoder on any device."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- match: {class: 'ForCausalLM$'}\n  replace: {op: GpuDecoder, activations: float32}\n")
    return str(rules)


@pytest.fixture
def gather_outputs() -> Callable[..., None]:
    return gather
