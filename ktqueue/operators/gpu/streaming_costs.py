"""StreamingCosts: whether a step should stream experts, and how many, from what this machine has shown.

All times are of one layer with routed experts, in seconds. A step that streams takes, per layer,
    max(gpu + (1 - share) * cpu(tokens), share * copy)
where `copy` brings and `cpu` computes all experts that are not on the GPU, and `gpu` is what else the layer needs: the
CPU waits for it, copies do not. The best share makes both equal. Knows no tensor.
"""

import math
from dataclasses import dataclass

GAIN = 0.85  # streaming must take at most this part of the time without it
NEWEST = 0.3  # weight of the newest step in what is learned


@dataclass(slots=True)
class StreamingCosts:
    """cpu_fixed, cpu_token: the CPU's time with all experts absent is cpu_fixed + cpu_token * tokens. copy: see above.
    gpu: not known before the first step; 0 asks for a little less streaming than would be best."""

    cpu_fixed: float
    cpu_token: float
    copy: float
    gpu: float = 0.0

    def cpu(self, tokens: int) -> float:
        """The CPU's time for all absent experts."""
        return self.cpu_fixed + self.cpu_token * tokens

    def share(self, tokens: int) -> float:
        """The part of the absent experts that should be streamed, from 0 to 1."""
        cpu = self.cpu(tokens)
        return min(1.0, (self.gpu + cpu) / (self.copy + cpu)) if self.copy + cpu > 0 else 1.0

    def pays(self, tokens: int) -> bool:
        """Whether a step of so many tokens is faster with streaming."""
        share, cpu = self.share(tokens), self.cpu(tokens)
        return max(self.gpu + (1 - share) * cpu, share * self.copy) < GAIN * (self.gpu + cpu)

    def learn(self, tokens: int, share: float, *, cpu: float, copy: float, whole: float) -> None:
        """Take in a step that streamed `share`: seconds a layer that the CPU computed, that copies took, in all."""
        if share < 1 and cpu > 0:
            factor = math.exp(NEWEST * math.log(cpu / ((1 - share) * self.cpu(tokens))))
            self.cpu_fixed *= factor
            self.cpu_token *= factor
        if share > 0 and copy > 0:
            self.copy += NEWEST * (copy / share - self.copy)
        if whole > 1.05 * copy:  # else the copies decided, and the rest is hidden behind them
            self.gpu += NEWEST * (max(0.0, whole - cpu) - self.gpu)


def fit(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """(fixed, per token) of a line through two (tokens, seconds), neither negative."""
    per_token = max(0.0, (large[1] - small[1]) / max(1, large[0] - small[0]))
    return max(0.0, small[1] - per_token * small[0]), per_token
