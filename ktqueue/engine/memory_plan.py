"""Divides the memory of a GPU, and says how many cache pages fit into the rest. Uses no device.

`ktqueue inspect` passes estimates; a worker passes measured values where it has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ktqueue.core.errors import ConfigError
from ktqueue.core.settings.engine import LEAST_AUTO_ROWS
from ktqueue.core.units import format_bytes

CONTEXT_BYTES = 600 << 20  # of the CUDA context with its kernels, measured on an H200
_LIBRARY_BYTES = 512 << 20  # workspaces of matrix and attention libraries
PLANNER_BYTES = 300 << 20
"""Of an attention planner on an H200, if 16 query heads share a key head: partial results, and indices of a plan."""
_GRAPH_BYTES = 16 << 20  # of a captured step: nodes and arguments of some hundred kernels
_PROMPT_GRAPH_BYTES = 36 << 20  # of a captured step with prompts, on an H200: its index arrays and logits, too
_ACTIVATIONS = 10  # float32 rows of the hidden size that a token needs at once, without those of its experts
ROW_TOKENS = 4096
"""Tokens of cache for each row: more than most requests have, and less than the context length of most models."""
_LOGITS = 8  # float32 rows of the vocabulary that a sampled row needs at once
SAMPLED_ROWS = 256  # most rows that are sampled at once, so that their workspace stays small
MOST_AUTO_ROWS = 2048 + 64  # of a batch, and of requests beside it
_LOGITS_SHARE = 0.02  # of the memory, for logits of all rows where the number of rows is auto and they are held at once
_STATES_SHARE = 0.1  # likewise, for states of linear attention


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """GPU memory in bytes that is used before the cache is allocated.

    weights: dense weights, and everything else that was allocated before. experts: experts in GPU memory, and
    everything else that the model prepares, such as rotary tables. workspaces: for the largest step and for libraries.
    graphs: captured steps. states: of linear attention.
    """

    weights: int
    experts: int
    workspaces: int
    graphs: int
    states: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.experts + self.workspaces + self.graphs + self.states


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Of `device_bytes` of memory, `limit_bytes` may be used. The cache has `pages` pages of `page_bytes` each."""

    device_bytes: int
    limit_bytes: int
    use: DeviceUse
    page_bytes: int
    pages: int

    def parts(self) -> dict[str, int]:
        """Bytes by purpose; the last entry is unused memory."""
        cache = self.pages * self.page_bytes
        states = {"states": self.use.states} if self.use.states else {}
        return {
            "weights": self.use.weights,
            "experts": self.use.experts,
            "workspaces": self.use.workspaces,
            "graphs": self.use.graphs,
            **states,
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
    """Give the cache the rest of `utilization` of the memory, or only `cache_bytes` of it, or only `num_pages`.

    Raises ConfigError with the setting, limit and value if the rest is too small.
    """
    limit = int(device_bytes * utilization)
    left = limit - use.total
    if left < page_bytes:
        raise ConfigError(
            f"engine.gpu_memory_utilization {utilization:g} of {format_bytes(device_bytes)} is {format_bytes(limit)}, "
            f"but weights ({format_bytes(use.weights)}), experts ({format_bytes(use.experts)}), workspaces "
            f"({format_bytes(use.workspaces)}), graphs ({format_bytes(use.graphs)}), states of linear attention "
            f"({format_bytes(use.states)}) and one page "
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
        device_bytes=device_bytes, limit_bytes=limit, use=use, page_bytes=page_bytes, pages=wanted // page_bytes
    )


def host_cache_bytes(
    available: int, *, token_bytes: int, rows: int, context: int, asked: int | None, utilization: float
) -> int:
    """Size of the cache on a CPU in bytes. `available`: bytes that are free once the weights are loaded.

    It has room for ROW_TOKENS tokens of each of `rows` sequences, or for the whole `context` if that is shorter, and
    for one sequence of `asked` tokens. It never takes more than `utilization` of the free memory.
    """
    tokens = max(rows * min(context, ROW_TOKENS), asked or 0)
    return min(tokens * token_bytes, int(available * utilization))


def estimate_step(tokens: int, rows: int, *, hidden: int, vocabulary: int, experts_per_token: int) -> int:
    """Device memory in bytes for a step of `tokens` tokens, `rows` of them scored. A generous estimate."""
    return 4 * (tokens * hidden * (_ACTIVATIONS + experts_per_token) + rows * vocabulary) + _LIBRARY_BYTES


def auto_rows(memory: int, *, step_tokens: int, vocabulary: int, row_state_bytes: int, in_parts: bool = False) -> int:
    """Most rows of an engine where that is auto: 2,112, or what fits a step and a small part of `memory` bytes.

    `row_state_bytes`: states of linear attention that a row needs. `in_parts`: whether logits are LogitsInParts, whose
    memory does not grow with the rows. Pages are no limit: rows wait for them.
    """
    by_logits = int(_LOGITS_SHARE * memory) // (3 * 4 * vocabulary)  # of float32, of 16 bits, and what sampling copies
    by_logits = MOST_AUTO_ROWS if in_parts else by_logits
    by_states = int(_STATES_SHARE * memory) // row_state_bytes if row_state_bytes else MOST_AUTO_ROWS
    return max(min(LEAST_AUTO_ROWS, step_tokens), min(MOST_AUTO_ROWS, step_tokens, by_logits, by_states))


def estimate_beside(step_bytes: int, tokens: int, rows: int, *, few: int, vocabulary: int, planner_bytes: int) -> int:
    """Device memory in bytes of a step of `few` tokens beside an overlapped one, and of what the latter has apart.

    The overlapped step, of `tokens` tokens and `rows` rows, needs `step_bytes`. planner_bytes: of an attention planner.
    """
    few = min(few, tokens)
    return step_bytes * few // tokens + 4 * min(rows, few, SAMPLED_ROWS) * vocabulary + planner_bytes


def estimate_selection(rows: int, vocabulary: int) -> int:
    """Device memory in bytes to sample `rows` rows, in the worst case."""
    return 4 * min(rows, SAMPLED_ROWS) * vocabulary * _LOGITS


def estimate_graphs(
    steps: int,
    step_bytes: int,
    tokens: int,
    rows: int,
    vocabulary: int,
    *,
    prompts: Sequence[int] = (),
    expanded_bytes: int = 0,
) -> int:
    """Device memory in bytes of `steps` captured decode steps, and of others of `prompts` tokens. All share tensors.

    The largest decode step has `rows` rows, all of them scored. A step of `tokens` tokens needs `step_bytes`.
    expanded_bytes: of expanded latents, for which every captured step with prompts has memory.
    """
    if not steps:
        return 0
    most = max(rows, *prompts) if prompts else rows
    graphs = steps * _GRAPH_BYTES + len(prompts) * _PROMPT_GRAPH_BYTES
    graphs += expanded_bytes if prompts else 0
    return graphs + step_bytes * most // tokens + 4 * rows * vocabulary
