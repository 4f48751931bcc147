"""DraftModel: a small model with the same vocabulary, which says what a sequence probably gets next. See docs/adr/0064.

Its cache has the pages of the engine's cache: a token's keys are in the same page and place, so nothing else has to be
allocated, shared or freed. It reads the tokens of a sequence itself, also those whose pages the engine found in its
prefix cache. Each draft is drawn with the noise of its position, so it is often the engine's token also where that is
not the likeliest.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ktqueue.engine.batch import Batch
from ktqueue.engine.gpu.device_model import device_model
from ktqueue.engine.logits import Logits
from ktqueue.engine.runner import DeviceTokens, Model, Runner
from ktqueue.engine.sequence import DraftProgress, Sequence
from ktqueue.engine.step_costs import StepCosts
from ktqueue.engine.token_selector import Selector
from ktqueue.operators.gpu.attention.base import AttentionPlanner
from ktqueue.operators.kv_cache import KVCache, KVLayout
from ktqueue.operators.step import StepContext

log = logging.getLogger(__name__)

# How often a draft is right after right ones, before any was seen. It is high, so that drafts are tried at all: only
# drafts tell how often they are right, and the balance limits what they lose.
FIRST_RATE = 0.9
LEARNING, COMMON_LEARNING = 1 / 32, 1 / 64  # part that one draft has in the rate of its sequence, and of new ones
FIRST_DRAFTS = 4  # that FIRST_RATE counts for in the common rate
RECOVERY, COMMON_RECOVERY = 1 / 256, 1 / 1024  # part of its loss that a rate gets back with each step without drafts
MOST_OF_A_STEP = 64  # drafts of all sequences, and rows of a pass that drafts, since each needs logits
LEAST_CHANCE = 0.05  # less likely drafts are not made
JOINED = 15  # see DraftModel.joined; more are read in a pass of their own, which is eager on a device


@dataclass(frozen=True, slots=True)
class DraftSource:
    """What a DraftModel is made of: a model, the layout of its cache, and the tokens that it can see.

    planner: of attention on a device; None: it is the planner of the engine's model.
    """

    model: Model
    layout: KVLayout
    longest: int
    planner: AttentionPlanner | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.layout.page_bytes

    def keep_hidden(self, pages: int, device: str) -> None:
        """Let the engine's model keep what the drafts need of each token. Call it before that model is captured."""

    def make(self, runner: Runner, kv: KVCache, selector: Selector, most_tokens: int) -> "DraftModel":
        """Make one that `runner` runs on `kv`, which has `layout`: see DraftModel."""
        return DraftModel(self, runner, kv, selector, most_tokens)


class DraftModel:
    """Drafts for sequences of up to `source.longest` tokens. `most_tokens`: of one pass. runner: of `source.model`."""

    unread = 1
    """Place of a sequence's last token in its cache, counted from the end of the sequence."""
    joined = JOINED
    """Known tokens before that one which the first pass may compute too."""

    def __init__(self, source: DraftSource, runner: Runner, kv: KVCache, selector: Selector, most_tokens: int) -> None:
        self.kv = kv
        self._model = device_model(source.model)
        self._runner = runner
        self._selector = selector
        self._longest = source.longest
        self._most_tokens = most_tokens
        self._rate = FIRST_RATE
        self._learnt = FIRST_DRAFTS  # drafts in the rate
        self._passes = StepCosts(most_tokens), StepCosts(most_tokens)  # first ones, and further ones
        self._readings = StepCosts(most_tokens)  # passes that read known tokens
        self._making = self._reading = 0.0  # seconds

    def pass_seconds(self, rows: int, ahead: int) -> float:
        """Seconds of a pass that adds draft `ahead`, from 0, to each of `rows` rows.

        The first one waits for the host, and a device need not wait before further ones. A pass of more rows than any
        before is said to take no longer, so that it is tried.
        """
        passes = self._passes[min(1, ahead)]
        return passes.seconds(min(rows, int(passes.points[-1][0])) if passes.points else rows)

    def reading_seconds(self, sequence: Sequence, ahead: int, costs: StepCosts) -> float:
        """Seconds to read the known tokens that the first pass does not compute, once a sequence has `ahead` more: all
        of a new one, or more than JOINED. 0 if there are none, or nothing was read before.

        costs: of the engine's steps. Passes of more tokens than any before are said to grow as they do.
        """
        computed, end = self._progress(sequence).computed, sequence.length + ahead - self.unread
        if not self._readings.points or end <= 0 or (computed > 0 and end <= computed + JOINED):
            return 0.0
        passes, rest = divmod(end - computed, self._most_tokens)
        whole = passes * self._reading_pass_seconds(self._most_tokens, costs)
        return whole + (self._reading_pass_seconds(rest, costs) if rest else 0.0)

    def _reading_pass_seconds(self, tokens: int, costs: StepCosts) -> float:
        """Seconds of one pass that reads so many tokens."""
        last, seconds = self._readings.points[-1]
        if tokens <= last or not costs.points:
            return self._readings.seconds(tokens)
        return costs.seconds(tokens) * min(1.0, seconds / costs.seconds(int(last)))

    def take_seconds(self) -> tuple[float, float]:
        """Seconds since the last call that were spent on drafts, and on reading known tokens before."""
        seconds = self._making, self._reading
        self._making = self._reading = 0.0
        return seconds

    def chances(self, sequence: Sequence, most: int, ahead: int = 0) -> list[float]:
        """How likely each of the next `most` drafts is right, together with all before it.

        ahead: tokens that the sequence gets before it has drafts.
        """
        progress = self._progress(sequence)
        chance, chances = 1.0, []
        for _ in range(min(most, self._longest - sequence.length - ahead)):
            chance *= progress.rate
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return chances

    def learn(self, sequence: Sequence, *, is_right: bool) -> None:
        """Note whether a draft after right ones was right."""
        progress = self._progress(sequence)
        progress.rate += LEARNING * (is_right - progress.rate)
        self._learnt += 1
        self._rate += max(COMMON_LEARNING, 1 / self._learnt) * (is_right - self._rate)

    def recover(self, sequences: Iterable[Sequence]) -> None:
        """Note a step of these sequences without drafts, from which nothing is learnt. So drafts are tried again."""
        self._rate += COMMON_RECOVERY * max(0.0, FIRST_RATE - self._rate)
        for sequence in sequences:
            if (progress := sequence.draft_progress) is not None and progress.rate < self._rate:
                progress.rate += RECOVERY * (self._rate - progress.rate)

    def drafts(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """The next `counts[sequence]` tokens of each sequence, at least one, whose places have pages.

        None for any if the device is out of memory. Raises RuntimeError for an error of the model.
        """
        try:
            return self._drafts(counts) if counts else {}
        except torch.OutOfMemoryError as error:
            log.warning("out of memory for drafts of %d sequences: %s", len(counts), error)
        # Outside the handler: the exception kept tensors alive.
        torch.cuda.empty_cache()
        for sequence in counts:
            sequence.draft_progress = None
        return {}

    def _drafts(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        began = time.monotonic()
        reading = self._read_known_tokens(list(counts))
        found: dict[Sequence, list[int]] = {sequence: [] for sequence in counts}
        live = list(counts)
        started, logits = began + reading, self._first_pass(live)
        for ahead in range(max(counts.values())):
            following = [sequence for sequence in live if counts[sequence] > ahead + 1]
            launched: list[Logits] = []
            launch = partial(self._launch, live, following, ahead, launched)
            selection = self._selector.select(logits, range(len(live)), live, launch, ahead=[ahead] * len(live))
            for sequence, token_id in zip(live, selection.token_ids, strict=True):
                found[sequence].append(token_id)
            if launched and not selection.redrawn:
                logits = launched[0]
            elif following:
                logits = self._runner.execute(self._next_batch(following, ahead, found))
            ended = time.monotonic()
            self._passes[min(1, ahead)].observe(len(live), ended - started)
            started, live = ended, following
        self._model.after_step()
        for sequence, token_ids in found.items():
            progress = self._progress(sequence)
            progress.computed = sequence.length + 1 - self.unread
            progress.ahead = self._kept(token_ids)
        self._reading += reading
        self._making += time.monotonic() - began - reading
        return found

    def _read_known_tokens(self, sequences: Many[Sequence]) -> float:
        """Compute all known tokens but the last ones, which the first pass computes, in passes of limited size.

        Returns the seconds of those that `reading_seconds` foretells. The others are part of the first pass.
        """
        seconds = 0.0
        room = min(self._most_tokens, MOST_OF_A_STEP) - len(sequences)
        for sequence in sequences:
            progress = self._progress(sequence)
            end = max(0, sequence.length - self.unread)
            while progress.ahead and progress.computed < end:
                if progress.ahead.pop(0) != sequence.tokens.item(progress.computed):
                    break
                progress.computed += 1
            progress.ahead = []
            progress.computed = min(progress.computed, end)
            # Those of a new sequence may be in pages that it shares with another one.
            if 0 < progress.computed < end <= progress.computed + min(self.joined, room):
                room -= end - progress.computed
                continue
            is_foretold = progress.computed == 0 or end > progress.computed + JOINED
            began = time.monotonic()
            while (left := end - progress.computed) > 0:
                first = progress.computed
                progress.computed += min(left, self._most_tokens)
                self._read(sequence, first, progress.computed)
            seconds += time.monotonic() - began if is_foretold else 0.0
        return seconds

    def _read(self, sequence: Sequence, first: int, end: int) -> None:
        """Compute the known tokens at the places from `first` to `end`."""
        further = self.unread - 1
        token_ids = sequence.tokens[first + further : end + further].tolist()
        began = time.monotonic()
        self._runner.execute(self._batch([(sequence, first, token_ids)], is_scored=False))
        self._runner.wait()  # the plan of its attention must not change while it runs
        self._readings.observe(end - first, time.monotonic() - began)

    def _first_pass(self, sequences: Many[Sequence]) -> Logits:
        """Compute the last token of each sequence, and those before it that are not computed yet.

        Returns the logits of the last ones, [sequences, vocab].
        """
        ends = [(one, one.length - self.unread, [one.tokens.item(one.length - 1)]) for one in sequences]
        unread = [row for sequence in sequences for row in self._unread_rows(sequence)]
        return self._runner.execute(self._batch(ends + unread))[: len(sequences)]

    def _next_batch(self, sequences: Many[Sequence], ahead: int, drafts: Mapping[Sequence, list[int]]) -> Batch:
        """The pass that computes draft `ahead` of each sequence, from 0, which is its last one; without any, a 0."""
        first = 1 + ahead - self.unread
        return self._batch([(one, one.length + first, (drafts.get(one) or [0])[-1:]) for one in sequences])

    def _launch(
        self,
        sequences: Many[Sequence],
        following: Many[Sequence],
        ahead: int,
        launched: list[Logits],
        tokens: torch.Tensor,
        _: bool,
    ) -> None:
        """Launch the pass of `following` before the host knows its tokens, if the device can: a Meanwhile.

        tokens: draft `ahead` of each sequence. launched: gets the logits.
        """
        if following and self._runner.prepare(batch := self._next_batch(following, ahead, {})):
            places = {sequence: place for place, sequence in enumerate(sequences)}
            launched.append(self._runner.execute(batch, DeviceTokens(tokens, [places[one] for one in following])))

    def _unread_rows(self, sequence: Sequence) -> list[tuple[Sequence, int, list[int]]]:
        """A row for each known token that is not computed yet, but the last one. As rows of one token they may replay a
        captured pass. All keys are written before any row attends."""
        first, further = self._progress(sequence).computed, self.unread - 1
        end = sequence.length - self.unread
        return [(sequence, place, [sequence.tokens.item(place + further)]) for place in range(first, end)]

    def _kept(self, drafts: list[int]) -> list[int]:
        """Those of the last drafts that were computed as if they were known."""
        return drafts[:-1]

    def copy_page(self, source: int, target: int) -> None:
        """Copy what is kept of a page."""
        self.kv.copy_page(source, target)

    def close(self) -> None:
        """Release what the model has on a device."""
        self._model.close()

    def _progress(self, sequence: Sequence) -> DraftProgress:
        if sequence.draft_progress is None:
            sequence.draft_progress = DraftProgress(self._rate)
        return sequence.draft_progress

    def _batch(self, rows: Many[tuple[Sequence, int, list[int]]], *, is_scored: bool = True) -> Batch:
        """Build a batch of rows: a sequence, the position of its first token here, and the tokens."""
        size = self.kv.layout.page_size
        table = np.zeros((len(rows), max(sequence.page_count for sequence, _, _ in rows)), dtype=np.int32)
        positions, slots, contexts = [], [], []
        for row, (sequence, first, token_ids) in zip(table, rows, strict=True):
            row[: sequence.page_count] = sequence.pages[: sequence.page_count]
            places = np.arange(first, first + len(token_ids))
            positions.append(places)
            slots.append(row[places // size].astype(np.int64) * size + places % size)
            contexts.append(first + len(token_ids))
        starts = np.cumsum([0, *(len(token_ids) for _, _, token_ids in rows)])
        return Batch(
            input_ids=torch.tensor([[token_id for _, _, token_ids in rows for token_id in token_ids]]),
            position_ids=torch.from_numpy(np.concatenate(positions)[None]),
            scored=torch.from_numpy(starts[1:] - 1 if is_scored else starts[:0]),
            step=StepContext(
                query_starts=torch.from_numpy(starts.astype(np.int32)),
                context_lengths=torch.tensor(contexts, dtype=torch.int32),
                page_table=torch.from_numpy(table),
                slot_mapping=torch.from_numpy(np.concatenate(slots)),
                kv=self.kv,
                state_sources=torch.empty(0, dtype=torch.int32),
                state_targets=torch.empty(0, dtype=torch.int32),
            ),
        )
