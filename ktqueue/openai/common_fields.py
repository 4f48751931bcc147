"""Fields that the bodies of generating endpoints share, and their translation to SamplingParams.

Ranges are OpenAI's if it has the field (temperature up to 2), else vLLM's. Null means the default. Unknown fields are
ignored, as by other OpenAI-compatible servers; `foreign_fields` lists those that are not.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from ktqueue.core.model_card import ModelCard
from ktqueue.core.request import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    JobClass,
    SamplingParams,
)
from ktqueue.openai.constraints import ConstraintFields
from ktqueue.openai.errors import UnsupportedParameter
from ktqueue.openai.validation import StrictBody, is_deeper, must_be

MAX_ID = 2**31 - 1
MAX_DIGITS = 20  # of a token id; Python refuses to parse thousands of digits
MAX_DEPTH = 32  # levels of lists and objects in a free-form field
MAX_METADATA = 16
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


def _stop(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if value is None:
        return None
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS:
        raise must_be(f"a string or a list of at most {MAX_STOP_STRINGS} strings", value)
    for text in strings:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
            raise must_be(f"made of strings of 1 to {MAX_STOP_LENGTH} characters", text)
    return strings


def _logit_bias(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise must_be(f"an object of at most {MAX_LOGIT_BIAS} token ids", value)
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > MAX_DIGITS or int(key) > MAX_ID:
            raise must_be("an object whose keys are token ids, strings are not supported", key)
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise must_be("an object whose values are numbers from -100 to 100", bias)
    return value


def _metadata(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise must_be(f"an object of at most {MAX_METADATA} strings", value)
    for key, text in value.items():
        if len(key) > 64 or not isinstance(text, str) or len(text) > 512:
            raise must_be("made of keys up to 64 and strings up to 512 characters", {key: text})
    return value


def shallow(value: Any) -> Any:
    """The free-form value itself, if it is nested at most MAX_DEPTH levels deep. Else raises a validation error."""
    if is_deeper(value, MAX_DEPTH):
        raise must_be(f"nested at most {MAX_DEPTH} levels deep", type(value).__name__)
    return value


Stop = Annotated[list[str] | str | None, BeforeValidator(_stop)]
LogitBias = Annotated[dict[str, float] | None, BeforeValidator(_logit_bias)]
Metadata = Annotated[dict[str, str] | None, BeforeValidator(_metadata)]
FreeObject = Annotated[dict[str, Any], BeforeValidator(shallow)]
TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]


class StreamOptions(StrictBody):
    """What a stream has besides text."""

    include_usage: bool | None = Field(None, description="End the stream with a chunk of token counts.")
    continuous_usage_stats: bool | None = Field(
        None, description="Counts are sent once, at the end: accepted only with include_usage: true."
    )
    include_obfuscation: Literal[False] | None = Field(None, description="Chunks are not padded.")


class CommonFields(ConstraintFields):
    """Fields of all generating endpoints: OpenAI's, then vLLM's, then ours."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str = Field(min_length=1, max_length=256)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop = None
    max_tokens: int | None = Field(None, ge=0, le=MAX_ID, description="0: only the prompt is computed.")
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias = None
    user: str | None = None
    metadata: Metadata = None
    service_tier: ServiceTier | None = Field(None, description="flex: class batch; all others: class interactive.")

    top_k: int | None = Field(None, ge=-1, le=MAX_ID, description="0 or -1: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    min_tokens: int | None = Field(None, ge=0, le=MAX_ID)
    ignore_eos: bool | None = None
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]] | None = Field(
        None, max_length=MAX_BAD_WORDS, description="Texts that must not appear in the answer."
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, description="If it is not empty, no other tokens are chosen."
    )
    skip_special_tokens: bool | None = Field(None, description="false: special tokens are part of the text.")
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its own tokens to the prompt. Default: not to messages."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_ID, description="Use only the last tokens of the prompt. -1: as many as there is room for."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Likeliest tokens at each place of the prompt. Not in streams."
    )
    return_token_ids: bool | None = Field(None, description="Add prompt_token_ids and token_ids.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Logprobs have token_id:ID instead of texts.")
    priority: int | None = Field(
        None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Within the class, lower values run first. Default 0."
    )

    timings: bool | None = Field(None, description="Add to usage the seconds in queue, tokeniser, prefill and decode.")
    job_class: Literal["interactive", "batch"] | None = None
    expires_in: float | None = Field(None, ge=0.001, le=366 * 86400, description="Seconds until the job expires.")

    def sampling(
        self,
        card: ModelCard | None,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        special_tokens: bool = False,
    ) -> SamplingParams:
        """The sampling parameters of this body, with the defaults of the model on `card`. Raises InvalidRequest.

        `prompt_logprobs`: for the answer, besides those of the field. `special_tokens`: the text must have them.
        """
        if self.prompt_logprobs is not None and self.stream:
            raise UnsupportedParameter(
                "prompt_logprobs is not allowed with stream: true; use echo with logprobs in /v1/completions",
                param="prompt_logprobs",
                limit="stream: false",
                value=self.prompt_logprobs,
            )
        alternatives = [count for count in (self.prompt_logprobs, prompt_logprobs) if count is not None]
        defaults = card.sampling_defaults if card else {}
        return SamplingParams(
            temperature=_or(self.temperature, defaults.get("temperature", 1.0)),
            top_k=max(0, int(_or(self.top_k, defaults.get("top_k", 0)))),
            # OpenAI allows 0: only the likeliest token. The smallest positive value means the same.
            top_p=max(math.ulp(0.0), _or(self.top_p, defaults.get("top_p", 1.0))),
            min_p=_or(self.min_p, defaults.get("min_p", 0.0)),
            repetition_penalty=_or(self.repetition_penalty, defaults.get("repetition_penalty", 1.0)),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()},
            seed=self.seed,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            max_tokens=max_tokens,
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            n=self.n or 1,
            prompt_logprobs=max(alternatives, default=None),
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            skip_special_tokens=self.skip_special_tokens is not False and not special_tokens,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
        )

    def truncation(self, card: ModelCard | None, max_tokens: int | None) -> int | None:
        """The number of tokens of the prompt that are used; None: all."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return None if card is None else max(1, card.max_model_len - max(1, max_tokens or 1))

    def reply_options(self) -> dict[str, Any]:
        """What the form of the answer depends on: see GenerationRequest."""
        options = {
            "timings": self.timings,
            "token_ids": self.return_token_ids,
            "tokens_as_ids": self.return_tokens_as_token_ids,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "null_usage": self.stream_options is not None and self.stream_options.include_usage,
        }
        set_options: dict[str, Any] = {name: True for name, value in options.items() if value}
        if self.service_tier is not None:
            set_options["service_tier"] = "flex" if self.service_tier == "flex" else "default"
        return set_options

    def class_of_job(self) -> JobClass:
        """The priority class: `job_class` if set, else by the service tier."""
        if self.job_class is not None:
            return JobClass(self.job_class)
        return JobClass.BATCH if self.service_tier == "flex" else JobClass.INTERACTIVE

    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk. Raises UnsupportedParameter for options without a stream."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise UnsupportedParameter(
                "stream_options is allowed only with stream: true", param="stream_options", limit="stream: true"
            )
        options = self.stream_options
        if options.continuous_usage_stats and not options.include_usage:
            raise UnsupportedParameter(
                "stream_options.continuous_usage_stats is allowed only with include_usage: true, and token counts are "
                "sent once, at the end of the stream",
                param="stream_options.continuous_usage_stats",
                limit="include_usage: true",
            )
        return bool(options.include_usage)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
