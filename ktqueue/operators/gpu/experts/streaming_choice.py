"""StreamingChoice: which share of the absent experts a long step streams.

Measured steps decide, and StreamingCosts says which share to try next. Steps are compared with others of similar
length: those with the same power of two as upper bound. The estimate for a share that was tried is the time of its
steps. For other shares it is the time that the costs predict, times a guess of how wrong they are. The share with the
lowest estimate wins. So a share is tried only while it promises more than all known ones. Knows no tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ktqueue.operators.gpu.experts.use_order import LEVELS

SHARES = tuple(level / LEVELS for level in range(LEVELS + 1))
SOME_SHARES = SHARES[1:]  # with these every step streams something
CAUTION = 1.15  # factor on the predicted time of an untried split: CPU and copies slow each other down
MAX_TRIED_SHARES = 6  # for one length; after that only tried shares are chosen
TRUSTED_RUNS = 2  # of a share: the first run compiles kernels and prepares copies
NEWEST_WEIGHT = 0.3  # of the newest step in what is learned
RETRY_STEPS, RETRY_RATIO = 32, 1.25  # a share up to RATIO times slower than the best is tried again after STEPS steps
FIXED_SECONDS = 2e-4  # a layer on the CPU with few experts: signals, threads that meet, an uneven choice


@dataclass(slots=True)
class StreamingCosts:
    """Predicts the time of a step that streams a share of the experts on this machine.

    All times are seconds for one layer with routed experts. `copy` copies all experts that are not on the GPU, and
    `cpu` computes those that are not copied. `gpu` is the GPU's time before the experts: the CPU waits for it, copies
    do not. Streaming all experts takes max(gpu, copy). Streaming none takes
        gpu + FIXED_SECONDS + 2 * rows + alone * cpu
    For a share in between, the CPU and the copies read the same memory at the same time:
        max(rows + share * copy, gpu + FIXED_SECONDS + 2 * rows + cpu)
    where `rows` moves the tokens that the CPU needs to it, or its results back, over the bus that also carries experts.

    cpu_fixed, cpu_token: while copies run, `cpu` is cpu_fixed for reading all absent experts, and cpu_token for all
    experts of a token. alone: the fraction of it that the CPU needs without copies. row: `rows` for a token.
    gpu_token: `gpu` is gpu_token * tokens; 0 before the first step. left: see UseOrder.
    """

    cpu_fixed: float
    cpu_token: float
    copy: float
    row: float = 0.0
    alone: float = 1.0
    gpu_token: float = 0.0
    experts_per_token: int = 8
    left: tuple[float, ...] = tuple(1 - share for share in SHARES)

    def uses(self, share: float) -> float:
        """The part of all uses that is left for the CPU, from 0 to 1."""
        level = min(LEVELS - 1, int(share * LEVELS))
        return self.left[level] + (share * LEVELS - level) * (self.left[level + 1] - self.left[level])

    def cpu(self, tokens: int, share: float) -> float:
        """The CPU's time."""
        return self.cpu_fixed * (1 - share) + self.cpu_token * tokens * self.uses(share)

    def gpu(self, tokens: int) -> float:
        """The GPU's time before the experts."""
        return self.gpu_token * tokens

    def rows(self, tokens: int, share: float) -> float:
        """The time of the rows in one direction: with a share of 0 all of them, else those of tokens for the CPU."""
        needed = 1 - (1 - self.uses(share)) ** self.experts_per_token if share > 0 else 1.0
        return self.row * tokens * needed

    def seconds(self, tokens: int, share: float) -> float:
        """The time of a layer that streams `share` of its absent experts, from 0 to 1."""
        gpu, rows = self.gpu(tokens), self.rows(tokens, share)
        if share == 1:
            return max(gpu, self.copy)
        before = gpu + FIXED_SECONDS + 2 * rows
        if share == 0:
            return before + self.alone * self.cpu(tokens, share)
        return max(rows + share * self.copy, before + self.cpu(tokens, share))

    def learn(self, tokens: int, share: float, *, cpu: float, copy: float, gpu: float) -> None:
        """Learn from a step that streamed `share`. cpu, copy, gpu: measured seconds per layer, 0: not known. The GPU's
        time contains the rows that come and go."""
        if share < 1 and cpu > 0:
            expected = self.cpu(tokens, share) * (self.alone if share == 0 else 1)
            factor = _limited(cpu / expected) ** NEWEST_WEIGHT if expected > 0 else 1.0
            self.cpu_fixed *= factor
            self.cpu_token *= factor
        if share > 0 and copy > 0 and self.copy > 0:
            self.copy *= _limited(copy / (share * self.copy)) ** NEWEST_WEIGHT
        if gpu > 0:
            without_rows = max(0.0, gpu - (2 * self.rows(tokens, share) if share < 1 else 0))
            credible = min(without_rows, max(2 * self.gpu(tokens), self.cpu(tokens, 0)))
            self.gpu_token += NEWEST_WEIGHT * (credible / tokens - self.gpu_token)


def fit_line(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """(fixed, per token) of a line through two points (tokens, seconds). Neither is negative."""
    per_token = max(0.0, (large[1] - small[1]) / max(1, large[0] - small[0]))
    return max(0.0, small[1] - per_token * small[0]), per_token


@dataclass(slots=True)
class _TriedShare:
    """factor: the time of its steps divided by the prediction of the initial costs, which makes steps of similar length
    comparable. last_step: number of the latest step with this share."""

    factor: float
    runs: int = 0
    last_step: int = 0


@dataclass(slots=True)
class _LengthHistory:
    """The steps of similar length, and the shares that were tried in them."""

    steps: int = 0
    tried: dict[float, _TriedShare] = field(default_factory=dict)


class StreamingChoice:
    """Chooses one of `shares` for the steps of a model with `layers` layers of routed experts."""

    def __init__(self, costs: StreamingCosts, layers: int, *, shares: Sequence[float] = SHARES) -> None:
        self._costs = costs
        self._initial_costs = replace(costs)  # `costs` learn, but old measurements must stay comparable; see `share`
        self._layers = layers
        self._shares = tuple(shares)
        self._histories: dict[int, _LengthHistory] = {}

    def share(self, tokens: int) -> float:
        """The share for a step of `tokens` tokens, from 0 (nothing is streamed) to 1."""
        history = self._history(tokens)
        self._initial_costs.left = self._costs.left  # measured times change with the part that the CPU has
        shares = self._shares
        if len(history.tried) >= MAX_TRIED_SHARES:
            shares = tuple(share for share in shares if share == 1 or share in history.tried)
        estimates = {share: self._estimate(history, tokens, share) for share in shares}
        best = min(reversed(shares), key=estimates.__getitem__)  # of equals, the largest: it leaves the CPU most alone
        to_retry = [
            share
            for share, tried in history.tried.items()
            if history.steps - tried.last_step >= RETRY_STEPS and estimates[share] <= RETRY_RATIO * estimates[best]
        ]
        return min(to_retry, key=lambda share: history.tried[share].last_step) if to_retry else best

    def forget_splits(self) -> None:
        """Forget the steps that streamed a part: the experts that the CPU has of it are others now."""
        for history in self._histories.values():
            history.tried = {share: tried for share, tried in history.tried.items() if share in (0, 1)}

    def learn(self, tokens: int, share: float, seconds: float) -> None:
        """Learn from the time of a whole step that streamed `share`."""
        history = self._history(tokens)
        history.steps += 1
        factor = seconds / self._seconds(self._initial_costs, tokens, share)
        tried = history.tried.setdefault(share, _TriedShare(factor))
        tried.runs += 1
        tried.last_step = history.steps
        if tried.runs <= TRUSTED_RUNS:
            tried.factor = min(tried.factor, factor)
        else:
            tried.factor += NEWEST_WEIGHT * (min(factor, 2 * tried.factor) - tried.factor)

    def _history(self, tokens: int) -> _LengthHistory:
        return self._histories.setdefault((tokens - 1).bit_length(), _LengthHistory())

    def _seconds(self, costs: StreamingCosts, tokens: int, share: float) -> float:
        return max(1e-9, self._layers * costs.seconds(tokens, share))

    def _estimate(self, history: _LengthHistory, tokens: int, share: float) -> float:
        """Expected seconds of a step. A share with too few runs is still estimated as if untried, unless its runs were
        better than that."""
        tried = history.tried.get(share)
        measured = None if tried is None else tried.factor * self._seconds(self._initial_costs, tokens, share)
        if tried is not None and measured is not None and tried.runs >= TRUSTED_RUNS:
            return measured
        guess = self._error_guess(history, tokens, share) * self._seconds(self._costs, tokens, share)
        return guess if measured is None else min(guess, measured)

    def _error_guess(self, history: _LengthHistory, tokens: int, share: float) -> float:
        """The factor by which the costs are probably wrong: 1 for streaming all or nothing.

        For a split it is the factor of the nearest split that was tried. If there is none, it is CAUTION times the
        better of the other two.
        """
        if share in (0, 1):
            return 1.0
        errors = {
            tried_share: tried.factor
            * self._seconds(self._initial_costs, tokens, tried_share)
            / self._seconds(self._costs, tokens, tried_share)
            for tried_share, tried in history.tried.items()
            if tried.runs >= TRUSTED_RUNS
        }
        splits = [tried_share for tried_share in errors if 0 < tried_share < 1]
        if splits:
            return max(1.0, errors[min(splits, key=lambda tried_share: abs(tried_share - share))])
        return CAUTION * max(1.0, min(errors.values(), default=1.0))


def _limited(ratio: float) -> float:
    """The part of a change that a single step can prove: something else may have been slow, such as a compilation."""
    return min(2.0, max(0.5, ratio))
