"""Tenants' limits in the calls of the script `submit_job`: its argument, its refusals, what is left. Does no I/O.

The script decides, by the server's clock and atomically with the submission.
"""

from dataclasses import dataclass
from math import ceil

from ktqueue.broker.scripts import ScriptRefused
from ktqueue.core.codec import dumps
from ktqueue.core.errors import KtqueueError, RateLimitExceeded, RequestTooLarge, TenantLimitReached
from ktqueue.core.request import GenerationRequest
from ktqueue.core.tenants import TenantLimits

ASSUMED_TOKENS = 256  # reserved for a choice without max_tokens; at the end the tokens it used are charged
UNLIMITED = 10**9  # the most tokens of an answer without max_tokens
BYTES_PER_TOKEN = 4  # estimate for a prompt that is not tokenised yet
MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens that a request reserves: an estimate of its prompt, and the total with all tokens that it may generate.

    `most`: the most tokens of its answers; without max_tokens it is a large number.
    """

    prompt: int
    total: int
    most: int

    @classmethod
    def of(cls, request: GenerationRequest) -> "Cost":
        """The prompt's number of token ids, or a quarter of its bytes, and max_tokens for each choice, if any."""
        if request.prompt_token_ids is not None:
            prompt = len(request.prompt_token_ids)
        elif request.prompt is not None:
            prompt = ceil(len(request.prompt.encode()) / BYTES_PER_TOKEN)
        else:
            size = len(dumps(request.messages)) + (len(dumps(request.tools)) if request.tools else 0)
            prompt = ceil(size / BYTES_PER_TOKEN)
        if request.prompt_only:
            return cls(prompt, prompt, 0)
        wanted, n = request.sampling.max_tokens, request.sampling.n
        if wanted is None:
            return cls(prompt, prompt + n * ASSUMED_TOKENS, UNLIMITED)
        return cls(prompt, prompt + n * wanted, n * wanted)


@dataclass(frozen=True, slots=True)
class RateStatus:
    """One rate of a tenant: the most at once, how much is left, and the seconds until all is available again."""

    limit: int
    remaining: int
    reset: float


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant has left after a submission; None for a rate without a limit."""

    requests: RateStatus | None
    tokens: RateStatus | None


def limit_argument(limits: TenantLimits | None, cost: Cost) -> str:
    """The script's argument: ten numbers, 0 for no limit. Empty for a caller without limits."""
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


def tenant_usage(limits: TenantLimits | None, numbers: list[int]) -> TenantUsage | None:
    """Decode the script's reply: requests left, microseconds until all are available, and the same for tokens."""
    if limits is None:
        return None

    def rate(limit: int | None, remaining: int, reset: int) -> RateStatus | None:
        return None if limit is None else RateStatus(limit, remaining, reset / MICROSECONDS)

    return TenantUsage(rate(limits.most_requests, *numbers[:2]), rate(limits.most_tokens, *numbers[2:]))


def check_size(limits: TenantLimits, cost: Cost, size: int) -> None:
    """Raise RequestTooLarge for a request that the limits never admit. `size`: in bytes."""
    if limits.max_queued_bytes is not None and size > limits.max_queued_bytes:
        raise RequestTooLarge(
            f"the request has {size} bytes, but all waiting requests of a tenant may have {limits.max_queued_bytes}",
            limit=limits.max_queued_bytes,
            value=size,
        )
    if limits.max_stored_bytes is not None and size > limits.max_stored_bytes:
        raise RequestTooLarge(
            f"the request has {size} bytes, but all stored jobs of a tenant may have {limits.max_stored_bytes}",
            limit=limits.max_stored_bytes,
            value=size,
        )
    if limits.most_tokens is not None and cost.total > limits.most_tokens:
        raise RequestTooLarge(
            f"the request may use {cost.total} tokens (its prompt, estimated from its bytes, and max_tokens for each "
            f"choice), but {limits.most_tokens} are allowed at once: use a smaller max_tokens or n",
            param="max_tokens",
            limit=limits.most_tokens,
            value=cost.total,
        )


def limit_error(refused: ScriptRefused, cost: Cost, retry_after: float) -> KtqueueError | None:
    """The error if a tenant's limit refused the job, else None.

    `retry_after`: in seconds, for limits that depend on when jobs end. Rates compute their own.
    """
    if not refused.code.startswith("TENANT_"):
        return None
    value, limit, wait = (int(word) for word in refused.detail.split())
    seconds = wait / MICROSECONDS
    match refused.code:
        case "TENANT_LIVE":
            what, param = f"{value} jobs of this tenant wait or run, but at most {limit} may", "max_live_jobs"
        case "TENANT_JOBS":
            what, param = f"{value} jobs of this tenant wait, but at most {limit} may", "max_queued_jobs"
        case "TENANT_BYTES":
            what, param = f"{value} bytes of this tenant's jobs wait, but at most {limit} may", "max_queued_bytes"
        case "TENANT_STORED":
            what, param = (
                f"{value} bytes of this tenant's jobs are stored, including ended ones, but at most {limit} may be",
                "max_stored_bytes",
            )
        case "TENANT_REQUESTS":
            return RateLimitExceeded(
                f"too many requests: {value} of {limit} are used at the moment, try again in {seconds:.3f} seconds",
                param="requests_per_minute",
                limit=limit,
                value=value,
                retry_after=seconds,
            )
        case _:
            return RateLimitExceeded(
                f"too many tokens: the request may use {cost.total}, {value} of {limit} are used at the moment, "
                f"try again in {seconds:.3f} seconds",
                param="tokens_per_minute",
                limit=limit,
                value=value,
                retry_after=seconds,
            )
    return TenantLimitReached(what, param=param, limit=limit, value=value, retry_after=retry_after)
