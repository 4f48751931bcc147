"""Request fields of OpenAI and other servers that our bodies do not have, and how each is handled.

A field is an alias of one of ours, or a hint that changes no answer, or it is refused by name if it asks for something
that this server cannot do. None of them is ignored silently. docs/reference/http-api.md has the same table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ktqueue.core.errors import InvalidRequest
from ktqueue.core.short_repr import short_repr
from ktqueue.openai.errors import UnsupportedParameter

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FieldRefusal:
    """Refuses a field unless `is_neutral(value, body)`: then the value asks for what happens anyway.

    `allowed` describes the neutral values, `advice` what to do instead.
    """

    allowed: str
    is_neutral: Callable[[Any, Body], bool]
    advice: str


def _is_empty(value: Any, body: Body) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is_absent(value: Any, body: Body) -> bool:
    return value is None


def _empty(advice: str) -> FieldRefusal:
    return FieldRefusal("empty or false", _is_empty, advice)


def _absent(advice: str) -> FieldRefusal:
    return FieldRefusal("left out", _is_absent, advice)


def _only(*neutral: Any, advice: str) -> FieldRefusal:
    # Booleans are compared by type too, because True == 1 in Python. 1 and 1.0 are the same number in JSON.
    def is_neutral(value: Any, body: Body) -> bool:
        return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral)

    words = [
        "null" if allowed is None else f"`{str(allowed).lower() if isinstance(allowed, bool) else allowed}`"
        for allowed in neutral
    ]
    return FieldRefusal(" or ".join(words), is_neutral, advice)


def _offers_no_tools(value: Any, body: Body) -> bool:
    return _is_empty(value, body) or body.get("tool_choice") == "none"


def _is_off(value: Any, body: Body) -> bool:
    return type(value) in (int, float) and value <= 0


def _penalises_nothing(value: Any, body: Body) -> bool:
    whole_text = type(value) is int and value == -1
    neutral: Mapping[str, tuple[float | None, ...]] = {
        "repetition_penalty": (None, 1), "repeat_penalty": (None, 1), "rep_pen": (None, 1),
        "presence_penalty": (None, 0), "frequency_penalty": (None, 0),
    }  # fmt: skip
    return whole_text or all(body.get(name) in values for name, values in neutral.items())


def _is_n(value: Any, body: Body) -> bool:
    return type(value) is int and value == (body.get("n") or 1)


ALIASES: Mapping[str, str] = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "rep_pen": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_sequence": "stop",
    "random_seed": "seed",
    "sampler_seed": "seed",
    "ban_eos_token": "ignore_eos",
}

_IDS = "no answer depends on it"
_SPEED = "it asks for speed, no answer depends on it"
_KEPT, _PART = "the prompt is always kept whole", "it means something only beside a field that is refused"
_TOOLS, _CHATS = "use tools", "use /v1/chat/completions"
_FORMAT, _BIAS = "use response_format, structured_outputs or tools", "use logit_bias"
_SAMPLER, _PENALTY = "use top_p or min_p", "use repetition_penalty, presence_penalty or frequency_penalty"
_BEAMS, _UNCUT, _LOGPROBS = "there is no beam search", "use truncate_prompt_tokens", "use logprobs"
_DRY = "there is no DRY sampling: use repetition_penalty"
_RANGE = "penalties look at the whole text"

HINTS: Mapping[str, str] = {
    **dict.fromkeys(("safety_identifier", "request_id", "rid", "store"), _IDS),
    **dict.fromkeys(
        (
            "cache_prompt", "id_slot", "keep_alive", "prediction", "prompt_cache_key", "prompt_cache_retention",
            "slot_id",
        ),
        _SPEED,
    ),
    **dict.fromkeys(("n_keep", "num_keep", "n_discard"), _KEPT),
    "guided_decoding_backend": "there is one way to constrain answers",
    **dict.fromkeys(
        (
            "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_range", "dry_sequence_breakers",
            "dynatemp_exponent", "mirostat_eta", "mirostat_tau", "smoothing_curve", "spaces_between_special_tokens",
            "xtc_threshold",
        ),
        _PART,
    ),
}  # fmt: skip

REFUSED: Mapping[str, FieldRefusal] = {
    # Tools, and other answers than plain text
    "tool_prompt": _empty(_TOOLS),
    "format": _empty(_FORMAT),
    "structural_tag": _empty(_FORMAT),
    "audio": _empty("only text is served"),
    "images": _empty("only text is served"),
    "image_data": _empty("only text is served"),
    "mm_processor_kwargs": _empty("only text is served"),
    "modalities": _only(["text"], advice="only text is served"),
    "moderation": _empty("there is no moderation"),
    "web_search_options": _absent("there is no web search"),
    "verbosity": _only("medium", advice="say in the prompt how long the answer should be"),
    # How the prompt is read
    "add_bos_token": _only(True, advice="use add_special_tokens"),
    "documents": _empty("give them in chat_template_kwargs"),
    "negative_prompt": _empty("there is no guidance"),
    "num_ctx": _absent("the server's max_model_len is the context"),
    "options": _empty("give its fields in the body itself"),
    "prompt_embeds": _empty("send text or token ids"),
    "raw": _empty("use /v1/completions"),
    "return_full_text": _empty("use echo in /v1/completions"),
    "template": _empty("use chat_template"),
    "token_healing": _empty("prompts are taken as they are"),
    "truncate": _absent(_UNCUT),
    "truncation": _only("disabled", advice=_UNCUT),
    # How tokens are chosen
    "adaptive_target": FieldRefusal("negative or `0`", _is_off, _SAMPLER),
    "banned_strings": _empty("use bad_words"),
    "banned_tokens": _empty(_BIAS),
    "custom_logit_processor": _empty(_BIAS),
    "custom_token_bans": _empty(_BIAS),
    "logits_processors": _empty(_BIAS),
    "cfg_scale": _only(1, advice="there is no guidance"),
    "guidance_scale": _only(1, advice="there is no guidance"),
    "penalty_alpha": _only(0, advice="there is no contrastive search"),
    "length_penalty": _only(1, advice=_BEAMS),
    "num_beams": _only(1, advice=_BEAMS),
    "use_beam_search": _empty(_BEAMS),
    "do_sample": _only(True, advice="use temperature 0"),
    "dry_multiplier": _only(0, advice=_DRY),
    "dynamic_temperature": _empty("use temperature"),
    "dynatemp_range": _only(0, advice="use temperature"),
    "dynatemp_high": _absent("use temperature"),
    "dynatemp_low": _absent("use temperature"),
    "temperature_last": _empty("temperature comes first"),
    "encoder_repetition_penalty": _only(1, advice=_PENALTY),
    "no_repeat_ngram_size": _only(0, advice=_PENALTY),
    "penalize_nl": _only(True, advice="a line break is penalised like other tokens"),
    "penalize_newline": _only(True, advice="a line break is penalised like other tokens"),
    "repeat_last_n": FieldRefusal("`-1`, or nothing is penalised", _penalises_nothing, _RANGE),
    "rep_pen_range": FieldRefusal("`-1`, or nothing is penalised", _penalises_nothing, _RANGE),
    "repetition_penalty_range": FieldRefusal("`-1`, or nothing is penalised", _penalises_nothing, _RANGE),
    "epsilon_cutoff": _only(0, advice=_SAMPLER),
    "eta_cutoff": _only(0, advice=_SAMPLER),
    "min_keep": _only(0, advice=_SAMPLER),
    "mirostat": _only(0, advice=_SAMPLER),
    "mirostat_mode": _only(0, advice=_SAMPLER),
    "samplers": _empty("their order is fixed"),
    "sampler_order": _empty("their order is fixed"),
    "sampler_priority": _empty("their order is fixed"),
    "skew": _only(0, advice=_SAMPLER),
    "smoothing_factor": _only(0, advice=_SAMPLER),
    "tfs": _only(1, advice=_SAMPLER),
    "tfs_z": _only(1, advice=_SAMPLER),
    "top_a": _only(0, advice=_SAMPLER),
    "nsigma": FieldRefusal("negative or `0`", _is_off, _SAMPLER),
    "top_n_sigma": FieldRefusal("negative or `0`", _is_off, _SAMPLER),
    "typical": _only(1, advice=_SAMPLER),
    "typical_p": _only(1, advice=_SAMPLER),
    "typ_p": _only(1, advice=_SAMPLER),
    "watermark": _empty("texts are not marked"),
    "xtc_probability": _only(0, advice=_SAMPLER),
    # Where an answer ends, and which parts of it are returned
    "max_length": _absent("use max_tokens"),
    "min_length": _absent("use min_tokens"),
    "n_indent": _only(0, advice="use stop"),
    "stop_regex": _empty("use stop"),
    "t_max_predict_ms": _only(0, -1, advice="use expires_in"),
    "thinking_token_budget": _empty("use max_completion_tokens"),
    "thinking_budget": _empty("use max_completion_tokens"),
    "no_stop_trim": _empty("use include_stop_str_in_output"),
    "n_probs": _only(0, advice=_LOGPROBS),
    "post_sampling_probs": _empty(_LOGPROBS),
    "return_logprob": _empty(_LOGPROBS),
    "top_n_tokens": _only(0, advice=_LOGPROBS),
    "decoder_input_details": _empty("use prompt_logprobs"),
    "details": _empty("use logprobs, or the events of /v1/jobs"),
    "response_fields": _empty("answers are whole"),
    "return_hidden_states": _empty("only text is returned"),
    "return_progress": _empty("a stream begins with the first token"),
    "return_tokens": _empty("use return_token_ids"),
    "timings_per_token": _empty("/metrics has the times"),
    # Weights and caches
    "adapter_id": _empty("there are no adapters"),
    "lora": _empty("there are no adapters"),
    "lora_path": _empty("there are no adapters"),
    "cache_salt": _empty("each tenant has pages of its own"),
    "kv_transfer_params": _empty("the cache is not moved"),
    "session_params": _empty("use X-Conversation-Id"),
    "vllm_xargs": _empty("there are no extensions"),
    "custom_params": _empty("there are no extensions"),
}  # fmt: skip

REFUSED_IN_CHATS: Mapping[str, FieldRefusal] = {
    "echo": _empty("use continue_final_message"),
    "suffix": _empty("use /v1/completions"),
    "best_of": FieldRefusal("equal to `n`", _is_n, "use /v1/completions"),
}


REFUSED_IN_COMPLETIONS: Mapping[str, FieldRefusal] = {
    "tools": FieldRefusal('empty, or `tool_choice` is `"none"`', _offers_no_tools, _CHATS),
    "functions": FieldRefusal('empty, or `tool_choice` is `"none"`', _offers_no_tools, _CHATS),
    "tool_choice": _only("none", advice=_CHATS),
    "function_call": _only("none", advice=_CHATS),
    **dict.fromkeys(
        (
            "chat_template", "chat_template_kwargs", "continue_final_message", "enable_thinking", "force_think",
            "reasoning", "reasoning_effort", "think", "thinking",
        ),
        _empty(_CHATS),
    ),
}  # fmt: skip


def translate(body: Body, *, chat: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """The body with our names instead of aliases, and the client's name of each field that was renamed.

    `chat`: whether the prompt is a conversation.

    Raises UnsupportedParameter for the first field that asks for something we cannot do, and InvalidRequest if an alias
    contradicts the field that it stands for.
    """
    translated = dict(body)
    names: dict[str, str] = {}
    for name, value in body.items():
        if value is None:
            continue
        rule = REFUSED.get(name) or (REFUSED_IN_CHATS if chat else REFUSED_IN_COMPLETIONS).get(name)
        if rule is not None and not rule.is_neutral(value, body):
            raise _unsupported(name, value, rule)
        if name in ALIASES:
            ours = ALIASES[name]
            if translated.get(ours) not in (None, value):
                raise InvalidRequest(
                    f"{name} means {ours}, and must be equal to it ({short_repr(translated[ours])}) or left out, "
                    f"got {short_repr(value)}",
                    param=name,
                    limit=short_repr(translated[ours]),
                    value=short_repr(value),
                )
            translated[ours] = value
            names[ours] = name
    return translated, names


def _unsupported(name: str, value: Any, rule: FieldRefusal) -> UnsupportedParameter:
    shown = short_repr(value)
    return UnsupportedParameter(
        f"{name} is not supported with the value {shown}: {rule.advice}", param=name, limit=rule.advice, value=shown
    )


def refused_fields() -> tuple[str, ...]:
    """The names of all fields that can be refused."""
    return tuple(sorted({*REFUSED, *REFUSED_IN_CHATS, *REFUSED_IN_COMPLETIONS}))
