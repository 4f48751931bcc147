"""What a client sends: a GenerationRequest with its SamplingParams, both immutable and checked when they are made."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.short_repr import short_repr
from ktqueue.core.webhook import Webhook

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024  # entries
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_PRIORITY = 100  # and the lowest is its negative
MAX_BAD_WORDS = 256
MAX_GRAMMAR = 1 << 20  # characters
MAX_TEMPLATE = 1 << 18  # characters
DROPPED = "[dropped when the job ended]"  # replaces a prompt

_Slotted = TypeVar("_Slotted", "SamplingParams", "GenerationRequest")


class JobClass(StrEnum):
    """Priority class of a job: somebody waits for the answer, or nobody does."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


def _refuse(param: str, value: Any, limit: str) -> InvalidRequest:
    shown = short_repr(value)
    return InvalidRequest(f"{param} must be {limit}, got {shown}", param=param, limit=limit, value=shown)


def _number(param: str, value: Any, low: float, high: float, limit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _refuse(param, value, limit)  # NaN fails both comparisons


def _integer(param: str, value: Any, low: int, high: int, limit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refuse(param, value, limit)


def _texts(param: str, value: Any, most: int) -> None:
    if not isinstance(value, tuple) or len(value) > most:
        raise _refuse(param, value, f"at most {most} strings")
    for text in value:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
            raise _refuse(param, text, f"strings of 1 to {MAX_STOP_LENGTH} characters")


def _token_ids(param: str, value: Any, most: int) -> None:
    if not isinstance(value, tuple) or len(value) > most:
        raise _refuse(param, value, f"at most {most} token ids")
    for token_id in value:
        _integer(param, token_id, 0, MAX_TOKEN_ID, "token ids")


def are_token_ids(values: Collection[Any]) -> bool:
    """Whether the values are integers from 0 to MAX_TOKEN_ID, at least one. Fast: a prompt may have a million."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_TOKEN_ID


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when a choice ends.

    temperature 0 is greedy. `top_k` 0 and `top_p` 1 are off. `logprobs` is the number of
    alternatives besides the chosen token (0: only the chosen token; None: no logprobs).
    `max_tokens` None means as many as the context holds, and 0 that only the prompt is computed.
    The noise of a seeded request is a pure function of (seed, choice index, position).
    `prompt_logprobs` is like `logprobs`, for the tokens of the prompt. `bad_words` are texts that
    must not appear. If `allowed_token_ids` is not empty, no other token is chosen. End tokens are never part of the
    text, stop strings only with `include_stop_str_in_output`, other special tokens only without `skip_special_tokens`.

    Raises InvalidRequest naming field, limit and value.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    prompt_logprobs: int | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0, "a number from 0 to 100")
        _integer("top_k", self.top_k, 0, MAX_TOKEN_ID, f"0 (off), or an integer to {MAX_TOKEN_ID}")
        _number("top_p", self.top_p, math.ulp(0.0), 1.0, "a number above 0 and at most 1")
        _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "a number from 0.01 to 100")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number from -2 to 2")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number from -2 to 2")
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _refuse("logit_bias", self.logit_bias, f"a map of at most {MAX_LOGIT_BIAS} token ids")
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias", token_id, 0, 2**31 - 1, "a map from token ids")
            _number("logit_bias", bias, -100.0, 100.0, "a map to numbers from -100 to 100")
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED, "a 64-bit integer")
        _texts("stop", self.stop, MAX_STOP_STRINGS)
        _texts("bad_words", self.bad_words, MAX_BAD_WORDS)
        _token_ids("stop_token_ids", self.stop_token_ids, MAX_LOGIT_BIAS)
        _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_LOGIT_BIAS)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, MAX_TOKEN_ID, f"an integer from 0 to {MAX_TOKEN_ID}")
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID, f"an integer from 0 to {MAX_TOKEN_ID}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_TOP_LOGPROBS, f"an integer from 0 to {MAX_TOP_LOGPROBS}")
        _integer("n", self.n, 1, MAX_CHOICES, f"an integer from 1 to {MAX_CHOICES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A generation request: exactly one of `messages`, `prompt` (text) or `prompt_token_ids`.

    `messages` go through the model's chat template with `tools` and `chat_template_kwargs`.
    `priority` orders the waiting jobs of a class, the lowest first: one step is worth
    `broker.priority_seconds` of waiting, so no job waits for ever.
    The job expires `expires_in` seconds after its submission, if that is set.
    `user` and `metadata` are stored with the job and never interpreted. `webhook` is called when the job ends.

    How the prompt is made: `chat_template` replaces the model's own. `add_generation_prompt` begins the assistant's
    message; `continue_final_message` leaves the last message open instead, so that the answer continues it. With
    `force_thinking` the prompt ends inside the model's reasoning. `suffix` is the text after the gap that a model with
    fill-in-the-middle tokens fills. `add_special_tokens`: whether the tokenizer adds its own, such as a first token;
    None: yes for a prompt, no for messages. Only the last `truncate_prompt_tokens` tokens of the prompt are used. With
    `return_prompt` the job's first events contain the prompt as text and tokens. With `prompt_only` these are the whole
    answer, and nothing is computed. With `return_pieces` they contain the bytes of each token too.

    What the answer must be: `grammar` is a Lark grammar in llguidance's dialect, which the answer matches after any
    reasoning. Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
    `grammar_field` is the client's field that asks for it, for errors.

    How the answer is read: `tool_parser` and `reasoning_parser` name the formats of tool calls and reasoning
    (ktqueue/answers); empty means that the text has none. `endpoint` names the HTTP endpoint whose form the answer has,
    and `reply_options` are what that form depends on. Workers do not read these two.

    Raises InvalidRequest naming field, limit and value.
    """

    model: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    job_class: JobClass = JobClass.INTERACTIVE
    priority: int = 0
    expires_in: float | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    user: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    webhook: Webhook | None = None
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    force_thinking: bool = False
    suffix: str | None = None
    truncate_prompt_tokens: int | None = None
    prompt_only: bool = False
    return_prompt: bool = False
    return_pieces: bool = False
    add_special_tokens: bool | None = None
    grammar: str | None = None
    grammar_field: str = "grammar"
    tool_parser: str = ""
    reasoning_parser: str = ""
    endpoint: str = ""
    reply_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not 0 < len(self.model) <= 256:
            raise _refuse("model", self.model, "a name of 1 to 256 characters")
        prompts = [n for n in ("messages", "prompt", "prompt_token_ids") if getattr(self, n) is not None]
        if len(prompts) != 1:
            raise InvalidRequest(
                "exactly one of messages, prompt or prompt_token_ids must be given, got "
                f"{', '.join(prompts) or 'none'}",
                param=prompts[1] if len(prompts) > 1 else "prompt",
            )
        if self.messages is not None:
            if not isinstance(self.messages, tuple) or not self.messages:
                raise _refuse("messages", self.messages, "a list of at least one message")
            for i, message in enumerate(self.messages):
                if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                    raise _refuse(f"messages[{i}]", message, "an object with a role")
        if self.prompt is not None and (not isinstance(self.prompt, str) or not self.prompt):
            raise _refuse("prompt", self.prompt, "a text that is not empty")
        if self.prompt_token_ids is not None:
            if not isinstance(self.prompt_token_ids, tuple) or not self.prompt_token_ids:
                raise _refuse("prompt_token_ids", self.prompt_token_ids, "a list of at least one token id")
            if not are_token_ids(self.prompt_token_ids):
                for token_id in self.prompt_token_ids:
                    _integer("prompt_token_ids", token_id, 0, MAX_TOKEN_ID, "a list of token ids")
        if not isinstance(self.sampling, SamplingParams):
            raise _refuse("sampling", self.sampling, "SamplingParams")
        try:
            object.__setattr__(self, "job_class", JobClass(self.job_class))
        except ValueError:
            raise _refuse("job_class", self.job_class, f"one of {', '.join(JobClass)}") from None
        _integer(
            "priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY, f"an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
        if not isinstance(self.tools, tuple) or not all(isinstance(tool, Mapping) for tool in self.tools):
            raise _refuse("tools", self.tools, "a list of objects")
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise _refuse("chat_template_kwargs", self.chat_template_kwargs, "an object")
        if self.user is not None and not isinstance(self.user, str):
            raise _refuse("user", self.user, "a text")
        if not isinstance(self.metadata, Mapping) or not all(
            isinstance(text, str) for pair in self.metadata.items() for text in pair
        ):
            raise _refuse("metadata", self.metadata, "a map from text to text")
        if isinstance(self.webhook, Mapping):
            object.__setattr__(self, "webhook", Webhook.of(self.webhook))
        if self.webhook is not None and not isinstance(self.webhook, Webhook):
            raise _refuse("webhook", self.webhook, "an object of url and events")
        if self.expires_in is not None:
            _number("expires_in", self.expires_in, 0.001, 366 * 86400, "seconds, above 0 and at most a year")
        self._check_prompt_options()
        if self.grammar is not None and (not isinstance(self.grammar, str) or not 0 < len(self.grammar) <= MAX_GRAMMAR):
            raise _refuse("grammar", self.grammar, f"a text of 1 to {MAX_GRAMMAR} characters")
        for name in ("tool_parser", "reasoning_parser", "endpoint"):
            if not isinstance(getattr(self, name), str) or len(getattr(self, name)) > 64:
                raise _refuse(name, getattr(self, name), "a name of at most 64 characters")
        if not isinstance(self.reply_options, Mapping):
            raise _refuse("reply_options", self.reply_options, "an object")

    def _check_prompt_options(self) -> None:
        flags = (
            "add_generation_prompt", "continue_final_message", "force_thinking", "prompt_only", "return_prompt",
            "return_pieces",
        )  # fmt: skip
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        if self.add_special_tokens is not None and not isinstance(self.add_special_tokens, bool):
            raise _refuse("add_special_tokens", self.add_special_tokens, "true or false")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt must not both be true",
                param="continue_final_message",
                limit="add_generation_prompt: false",
                value=True,
            )
        if self.chat_template is not None:
            if self.messages is None:
                raise _refuse("chat_template", self.chat_template, "left out without messages")
            if not isinstance(self.chat_template, str) or not 0 < len(self.chat_template) <= MAX_TEMPLATE:
                raise _refuse("chat_template", self.chat_template, f"a text of 1 to {MAX_TEMPLATE} characters")
        if self.suffix is not None and (not isinstance(self.suffix, str) or self.prompt is None):
            raise _refuse("suffix", self.suffix, "a text, and allowed only beside a prompt that is a text")
        if self.truncate_prompt_tokens is not None:
            limit = f"an integer from 1 to {MAX_TOKEN_ID}"
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_TOKEN_ID, limit)

    def with_seed(self, seed: int) -> "GenerationRequest":
        """Return the same request with this seed of 63 bits. `replace` would repeat all checks, ten times as slow."""
        sampling, request = _copy(self.sampling), _copy(self)
        object.__setattr__(sampling, "seed", seed)
        object.__setattr__(request, "sampling", sampling)
        return request


def _copy(original: _Slotted) -> _Slotted:
    copy = object.__new__(type(original))
    for name in type(original).__slots__:
        object.__setattr__(copy, name, getattr(original, name))
    return copy


def summary_of(request: GenerationRequest) -> GenerationRequest:
    """Return what is kept of a request after its job has ended: no prompt, messages, tools, grammar or long lists."""
    small = replace(request.sampling, logit_bias={}, stop=(), stop_token_ids=(), bad_words=(), allowed_token_ids=())
    return GenerationRequest(
        model=request.model,
        messages=None if request.messages is None else ({"role": "user", "content": DROPPED},),
        prompt=None if request.messages is not None else DROPPED,
        sampling=small,
        job_class=request.job_class,
        priority=request.priority,
        expires_in=request.expires_in,
        user=request.user,
        metadata=request.metadata,
        webhook=request.webhook,
        tool_parser=request.tool_parser,
        reasoning_parser=request.reasoning_parser,
        endpoint=request.endpoint,
        reply_options=request.reply_options,
    )
