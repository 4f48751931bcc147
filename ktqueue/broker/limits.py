"""Tenants' limits on their way into the `submit` script and out of it: arguments, refusals, what is left. Pure.

The script decides, by the server's clock and in one piece with the submission; here is what its words mean.
"""

from dataclasses import dataclass
from math import ceil

from ktqueue.broker.scripts import Refused
from ktqueue.core.codec import dumps
from ktqueue.core.errors import KtqueueError, RateLimitExceeded, RequestTooLarge, TenantLimitReached
from ktqueue.core.limits import TenantLimits
from ktqueue.core.request import GenerationRequest

ASSUMED_TOKENS = 256  # reserved for a choice without max_tokens; what it takes is charged in the end all the same
BYTES_PER_TOKEN = 4  # of a prompt that is not tokenised yet
MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens that a request reserves: `prompt` as estimated, `total` with all that may be generated."""

    prompt: int
    total: int

    @classmethod
    def of(cls, request: GenerationRequest) -> "Cost":
        """A quarter of the prompt's bytes, or the ids where it has some, and max_tokens for each choice."""
        if request.prompt_token_ids is not None:
            prompt = len(request.prompt_token_ids)
        elif request.prompt is not None:
            prompt = ceil(len(request.prompt.encode()) / BYTES_PER_TOKEN)
        else:
            size = len(dumps(request.messages)) + (len(dumps(request.tools)) if request.tools else 0)
            prompt = ceil(size / BYTES_PER_TOKEN)
        return cls(prompt, prompt + request.sampling.n * (request.sampling.max_tokens or ASSUMED_TOKENS))


NO_COST = Cost(0, 0)  # of a caller whose jobs are not counted


@dataclass(frozen=True, slots=True)
class Rate:
    """One of a tenant's rates: the most at once, what is left of it, and the seconds until all of it is."""

    limit: int
    remaining: int
    reset: float


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a tenant stands after a submission; None for a rate that it has no limit of."""

    requests: Rate | None
    tokens: Rate | None


def limit_words(limits: TenantLimits | None, cost: Cost) -> str:
    """The script's argument: ten numbers, 0 for no limit; empty for a caller whose jobs are not counted."""
    if limits is None:
        return ""
    numbers = (
        limits.max_live_jobs,
        limits.max_queued_jobs,
        limits.max_queued_bytes,
        limits.requests_per_minute,
        limits.most_requests,
        limits.tokens_per_minute,
        limits.most_tokens,
        cost.prompt,
        cost.total,
        limits.max_stored_bytes,
    )
    return " ".join(str(number or 0) for number in numbers)


def standing(limits: TenantLimits | None, numbers: list[int]) -> Standing | None:
    """From the script's reply: requests left, us until all are, and the same of tokens."""
    if limits is None:
        return None

    def rate(limit: int | None, remaining: int, reset: int) -> Rate | None:
        return None if limit is None else Rate(limit, remaining, reset / MICROSECONDS)

    return Standing(rate(limits.most_requests, *numbers[:2]), rate(limits.most_tokens, *numbers[2:]))


def check_size(limits: TenantLimits, cost: Cost, size: int) -> None:
    """Raises RequestTooLarge for a request that no waiting would let in. `size`: bytes."""
    if limits.max_queued_bytes is not None and size > limits.max_queued_bytes:
        raise RequestTooLarge(
            f"the request has {size} bytes, all that wait of a tenant may have {limits.max_queued_bytes}",
            limit=limits.max_queued_bytes,
            value=size,
        )
    if limits.max_stored_bytes is not None and size > limits.max_stored_bytes:
        raise RequestTooLarge(
            f"the request has {size} bytes, all that is stored of a tenant may have {limits.max_stored_bytes}",
            limit=limits.max_stored_bytes,
            value=size,
        )
    if limits.most_tokens is not None and cost.total > limits.most_tokens:
        raise RequestTooLarge(
            f"the request may take {cost.total} tokens (prompt, as estimated from its bytes, and max_tokens for each "
            f"choice), {limits.most_tokens} are allowed at once: ask for a smaller max_tokens or n",
            param="max_tokens",
            limit=limits.most_tokens,
            value=cost.total,
        )


def limit_error(refused: Refused, cost: Cost, retry_after: float) -> KtqueueError | None:
    """The error for a refusal by a tenant's limit, else None.

    `retry_after`: seconds, for the limits that depend on when jobs end; rates know better.
    """
    if not refused.code.startswith("TENANT_"):
        return None
    value, limit, wait = (int(word) for word in refused.detail.split())
    seconds = wait / MICROSECONDS
    match refused.code:
        case "TENANT_LIVE":
            what, param = f"{value} jobs of this tenant wait or run, at most {limit} may", "max_live_jobs"
        case "TENANT_JOBS":
            what, param = f"{value} jobs of this tenant wait, at most {limit} may", "max_queued_jobs"
        case "TENANT_BYTES":
            what, param = f"jobs of {value} bytes of this tenant wait, at most {limit} may", "max_queued_bytes"
        case "TENANT_STORED":
            what, param = (
                f"{value} bytes of this tenant's jobs are stored, ended ones too for a while, at most {limit} may be",
                "max_stored_bytes",
            )
        case "TENANT_REQUESTS":
            return RateLimitExceeded(
                f"too many requests: {value} of {limit} count at this moment, try again in {seconds:.3f} seconds",
                param="requests_per_minute",
                limit=limit,
                value=value,
                retry_after=seconds,
            )
        case _:
            return RateLimitExceeded(
                f"too many tokens: the request may take {cost.total}, {value} of {limit} count at this moment, "
                f"try again in {seconds:.3f} seconds",
                param="tokens_per_minute",
                limit=limit,
                value=value,
                retry_after=seconds,
            )
    return TenantLimitReached(what, param=param, limit=limit, value=value, retry_after=retry_after)
