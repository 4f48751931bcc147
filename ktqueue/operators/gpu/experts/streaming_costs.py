"""StreamingCosts: what a step that streams a share of the experts should take on this machine.

All times are of one layer with routed experts, in seconds. `copy` brings and `cpu` computes all experts that are not on
the GPU; `gpu` is what the layer needs before its experts: the CPU waits for it, copies do not. Streaming all of them
takes max(gpu, copy), none
    gpu + FIXED + 2 * rows + alone * cpu
and a share between, in which the CPU and the copies read the same memory at the same time,
    max(rows + share * copy, gpu + FIXED + 2 * rows + (1 - share) * cpu)
where `rows` brings all tokens to the CPU, or its results back, on the bus that brings the experts. Knows no tensor.
"""

from dataclasses import dataclass

FIXED = 2e-4  # of a layer on the CPU, however few of its experts are used: signals, threads that meet, a skewed choice
NEWEST = 0.3  # weight of the newest step in what is learned


@dataclass(slots=True)
class StreamingCosts:
    """cpu_fixed, cpu_token: `cpu` is cpu_fixed + cpu_token * tokens, while copies run. alone: the part of it that the
    CPU needs without them. copy: see above. row: `rows` is row * tokens. gpu_token: `gpu` is gpu_token * tokens; not
    known before the first step."""

    cpu_fixed: float
    cpu_token: float
    copy: float
    row: float = 0.0
    alone: float = 1.0
    gpu_token: float = 0.0

    def cpu(self, tokens: int) -> float:
        """The CPU's time for all absent experts."""
        return self.cpu_fixed + self.cpu_token * tokens

    def gpu(self, tokens: int) -> float:
        """The GPU's time before the experts."""
        return self.gpu_token * tokens

    def seconds(self, tokens: int, share: float) -> float:
        """What a layer takes that streams `share` of its absent experts, from 0 to 1."""
        gpu, rows = self.gpu(tokens), self.row * tokens
        if share == 1:
            return max(gpu, self.copy)
        before = gpu + FIXED + 2 * rows
        if share == 0:
            return before + self.alone * self.cpu(tokens)
        return max(rows + share * self.copy, before + (1 - share) * self.cpu(tokens))

    def learn(self, tokens: int, share: float, *, cpu: float, copy: float, gpu: float) -> None:
        """Take in a step that streamed `share`: seconds a layer that the CPU, the copies and the GPU took for their
        parts (the GPU's with rows that come and go); 0: not known."""
        if share < 1 and cpu > 0:
            expected = (1 - share) * self.cpu(tokens) * (self.alone if share == 0 else 1)
            factor = _bounded(cpu / expected) ** NEWEST if expected > 0 else 1.0
            self.cpu_fixed *= factor
            self.cpu_token *= factor
        if share > 0 and copy > 0 and self.copy > 0:
            self.copy *= _bounded(copy / (share * self.copy)) ** NEWEST
        if gpu > 0:
            own = max(0.0, gpu - (2 * self.row * tokens if share < 1 else 0))
            believed = min(own, max(2 * self.gpu(tokens), self.cpu(tokens)))
            self.gpu_token += NEWEST * (believed / tokens - self.gpu_token)


def _bounded(ratio: float) -> float:
    """What is believed of one step, in which something else may have been slow: a kernel that was compiled, say."""
    return min(2.0, max(0.5, ratio))


def fit(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """(fixed, per token) of a line through two (tokens, seconds), neither negative."""
    per_token = max(0.0, (large[1] - small[1]) / max(1, large[0] - small[0]))
    return max(0.0, small[1] - per_token * small[0]), per_token
