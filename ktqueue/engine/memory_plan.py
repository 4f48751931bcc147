"""What the memory of a GPU is for, and how many pages of the cache that leaves. Pure: no device is asked.

Before loading the parts are estimates (`ktqueue inspect`), in a worker most are measured.
"""

from dataclasses import dataclass

from ktqueue.core.errors import ConfigError
from ktqueue.core.units import format_bytes

CONTEXT_BYTES = 600 << 20  # CUDA's own, kernels included, measured on an H200
_LIBRARY_BYTES = 512 << 20  # workspaces of matrix and attention libraries
_GRAPH_BYTES = 16 << 20  # a captured step: nodes and arguments of some hundred kernels
_ACTIVATIONS = 10  # float32 rows of the hidden size that a token has at once, beside those of its experts
ROW_TOKENS = 4096
"""Of the cache, for each sequence that may run: more than most requests have, less than most models can attend to."""
_LOGITS = 8  # float32 rows of the vocabulary that a sampled row has at once


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Bytes of a GPU that are taken before there is a cache.

    weights: dense ones, and all else that was taken before. experts: of those placed here, with all else that the
    model prepares. workspaces: of the largest step and of libraries. graphs: of captured steps.
    """

    weights: int
    experts: int
    workspaces: int
    graphs: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.experts + self.workspaces + self.graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """`device_bytes` of memory, of which `limit_bytes` may be used; `pages` of `page_bytes` each are the cache."""

    device_bytes: int
    limit_bytes: int
    use: DeviceUse
    page_bytes: int
    pages: int

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for; the last is what nobody touches."""
        cache = self.pages * self.page_bytes
        return {
            "weights": self.use.weights,
            "experts": self.use.experts,
            "workspaces": self.use.workspaces,
            "graphs": self.use.graphs,
            "cache": cache,
            "free": self.device_bytes - self.use.total - cache,
        }


def plan_memory(
    device_bytes: int,
    use: DeviceUse,
    *,
    utilization: float,
    page_bytes: int,
    cache_bytes: int | None = None,
    num_pages: int | None = None,
) -> MemoryPlan:
    """Give the cache what is left of `utilization` of the memory; or `cache_bytes` of it, or `num_pages`.

    Raises ConfigError naming setting, limit and value where nothing is left, or less than asked for.
    """
    limit = int(device_bytes * utilization)
    left = limit - use.total
    if left < page_bytes:
        raise ConfigError(
            f"engine.gpu_memory_utilization {utilization:g} of {format_bytes(device_bytes)} is {format_bytes(limit)}, "
            f"but weights ({format_bytes(use.weights)}), experts ({format_bytes(use.experts)}), workspaces "
            f"({format_bytes(use.workspaces)}), graphs ({format_bytes(use.graphs)}) and one page "
            f"({format_bytes(page_bytes)}) need {format_bytes(use.total + page_bytes)}: raise it, or lower "
            "engine.gpu_expert_memory_bytes or engine.max_num_batched_tokens",
            param="engine.gpu_memory_utilization",
            limit=limit,
            value=utilization,
        )
    if num_pages is not None:
        wanted, name, value = num_pages * page_bytes, "engine.num_pages", num_pages
    elif cache_bytes is not None:
        wanted, name, value = cache_bytes, "engine.kv_cache_bytes", cache_bytes
    else:
        wanted, name, value = left, "", left
    if not page_bytes <= wanted <= left:
        raise ConfigError(
            f"{name} {value} is {format_bytes(wanted)} of cache; it must be at least one page of "
            f"{format_bytes(page_bytes)} and at most the {format_bytes(left)} that weights, experts, workspaces and "
            f"graphs leave of engine.gpu_memory_utilization {utilization:g}",
            param=name,
            limit=left,
            value=value,
        )
    return MemoryPlan(
        device_bytes=device_bytes,
        limit_bytes=limit,
        use=use,
        page_bytes=page_bytes,
        pages=wanted // page_bytes,
    )


def host_cache_bytes(
    available: int,
    *,
    token_bytes: int,
    rows: int,
    context: int,
    asked: int | None,
    utilization: float,
) -> int:
    """Bytes that the cache on a CPU takes of `available` bytes, which are free once weights are loaded: enough for
    ROW_TOKENS tokens of each of `rows` sequences, or their whole `context` where that is shorter, and for one sequence
    of `asked` tokens; never more than `utilization` of what is free.
    """
    tokens = max(rows * min(context, ROW_TOKENS), asked or 0)
    return min(tokens * token_bytes, int(available * utilization))


def estimate_step(tokens: int, rows: int, *, hidden: int, vocabulary: int, experts_per_token: int) -> int:
    """Bytes that a step of `tokens` tokens, `rows` of them scored, needs on the device; generous."""
    return 4 * (tokens * hidden * (_ACTIVATIONS + experts_per_token) + rows * vocabulary) + _LIBRARY_BYTES


def estimate_selection(rows: int, vocabulary: int) -> int:
    """Bytes that choosing tokens for `rows` rows needs on the device, in the worst case."""
    return 4 * rows * vocabulary * _LOGITS


def estimate_graphs(steps: int, step_bytes: int, tokens: int, rows: int) -> int:
    """Bytes of so many captured steps, the largest of `rows` rows, whose tensors all share; a step of `tokens` tokens
    needs `step_bytes`."""
    return steps * _GRAPH_BYTES + step_bytes * rows // tokens if steps else 0
