"""StreamingCosts: whether a step should stream experts, and how many, from what this machine has shown.

All times are of one layer with routed experts, in seconds. A step that streams takes, per layer,
    max(gpu(tokens) + (1 - share) * cpu(tokens), share * copy)
where `copy` brings and `cpu` computes all experts that are not on the GPU, and `gpu` is what the layer needs before its
experts: the CPU waits for it, copies do not. The best share makes both equal. Knows no tensor.
"""

from dataclasses import dataclass

GAIN = 0.85  # streaming must take at most this part of the time without it
NEWEST = 0.3  # weight of the newest step in what is learned


@dataclass(slots=True)
class StreamingCosts:
    """cpu_fixed, cpu_token: `cpu` is cpu_fixed + cpu_token * tokens. copy: see above. gpu_token: `gpu` is gpu_token *
    tokens; not known before the first step, and 0 asks for a little less streaming than would be best."""

    cpu_fixed: float
    cpu_token: float
    copy: float
    gpu_token: float = 0.0

    def cpu(self, tokens: int) -> float:
        """The CPU's time for all absent experts."""
        return self.cpu_fixed + self.cpu_token * tokens

    def gpu(self, tokens: int) -> float:
        """The GPU's time before the experts."""
        return self.gpu_token * tokens

    def share(self, tokens: int) -> float:
        """The part of the absent experts that should be streamed, from 0 to 1."""
        cpu = self.cpu(tokens)
        return min(1.0, (self.gpu(tokens) + cpu) / (self.copy + cpu)) if self.copy + cpu > 0 else 1.0

    def pays(self, tokens: int) -> bool:
        """Whether a step of so many tokens is faster with streaming."""
        share, cpu, gpu = self.share(tokens), self.cpu(tokens), self.gpu(tokens)
        return max(gpu + (1 - share) * cpu, share * self.copy) < GAIN * (gpu + cpu)

    def learn(self, tokens: int, share: float, *, cpu: float, copy: float, gpu: float) -> None:
        """Take in a step that streamed `share`: seconds a layer that the CPU, the copies and the GPU took for their
        parts; 0: not known."""
        if share < 1 and cpu > 0:
            factor = _bounded(cpu / ((1 - share) * self.cpu(tokens))) ** NEWEST
            self.cpu_fixed *= factor
            self.cpu_token *= factor
        if share > 0 and copy > 0:
            self.copy *= _bounded(copy / (share * self.copy)) ** NEWEST
        if gpu > 0:
            believed = min(gpu, max(2 * self.gpu(tokens), self.cpu(tokens)))
            self.gpu_token += NEWEST * (believed / tokens - self.gpu_token)


def _bounded(ratio: float) -> float:
    """What is believed of one step, in which something else may have been slow: a kernel that was compiled, say."""
    return min(2.0, max(0.5, ratio))


def fit(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """(fixed, per token) of a line through two (tokens, seconds), neither negative."""
    per_token = max(0.0, (large[1] - small[1]) / max(1, large[0] - small[0]))
    return max(0.0, small[1] - per_token * small[0]), per_token
