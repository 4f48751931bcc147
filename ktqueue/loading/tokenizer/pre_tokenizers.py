"""How byte-level BPE vocabularies split text before merging: regular expressions by pre-tokenizer name.

The names are values of `tokenizer.ggml.pre`. The expressions are those of the models' own tokenizer files. Knows no
tokenizer library.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split. `patterns` are applied one after another; matches and the text between them become pieces.

    `nfc`: the text is normalised first. `whole_words`: a piece that is a token itself is not built from merges.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False


# Letters that have case, as DeepSeek's first tokenizer lists them.
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SINGLE_DIGITS = _LETTERS + r"\p{N}|" + _TAIL
_THREE_DIGITS = _LETTERS + r"\p{N}{1,3}|" + _TAIL
_DIGITS_FIRST = PreTokenizer((r"\p{N}", _GPT2 + r"|\s+"))
_GPT2_WHOLE = PreTokenizer((_GPT2 + r"|\s+",))
_QWEN2 = PreTokenizer((_SINGLE_DIGITS,), nfc=True)
_LLAMA3 = PreTokenizer((_THREE_DIGITS,), whole_words=True)
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        # with line ends as characters, as in the model's file
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    )
)
_AFMOE = PreTokenizer(  # llama.cpp's: digits by three from the right
    (
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
        "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        _DEEPSEEK_V3.patterns[-1],
    )
)
_BAILING = PreTokenizer(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)


def _words_by_case(ending: str, digits: str, but: str = "") -> str:
    """Words that are cut where an upper-case letter follows a lower-case one. `ending`: what may follow a word."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}|{digits}|"


_GPT_4O = PreTokenizer((_words_by_case(_CONTRACTIONS + "?", r"\p{N}{1,3}") + r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,))
_TEKKEN = PreTokenizer((_words_by_case("", r"\p{N}") + r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,), whole_words=True)
_KIMI_K2 = PreTokenizer((r"[\p{Han}]+|" + _words_by_case(_CONTRACTIONS + "?", r"\p{N}{1,3}", r"&&[^\p{Han}]") + _TAIL,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        (
            "gpt-2",
            "a.x-4.0",
            "exaone4",
            "gigachat",
            "granite-docling",
            "jais",
            "mellum",
            "mpt",
            "olmo",
            "phi-2",
            "trillion",
        ),
        _GPT2_WHOLE,
    ),
    **dict.fromkeys(
        ("codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder"), _DIGITS_FIRST
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2 + r"|\s+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN2),
    **dict.fromkeys(("grok-2", "hunyuan", "solar-open", "stablelm2"), PreTokenizer((_SINGLE_DIGITS,))),
    "qwen35": PreTokenizer(
        (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,), nfc=True
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "midm-2.0", "pixtral"), _LLAMA3
    ),
    **dict.fromkeys(("chatglm-bpe", "dbrx", "glm4", "glm5", "smaug-bpe"), PreTokenizer((_THREE_DIGITS,))),
    **dict.fromkeys(("gpt-4o", "kanana2", "llama4"), _GPT_4O),
    "afmoe": _AFMOE,
    "minimax-m2": PreTokenizer(_GPT_4O.patterns),
    "tekken": _TEKKEN,
    **dict.fromkeys(("cohere2moe", "tiny_aya"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT_4O.patterns))),
    "kimi-k2": _KIMI_K2,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": PreTokenizer((_LETTERS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,)),
    "exaone-moe": PreTokenizer(
        (
            _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _SINGLE_DIGITS)),
    "deepseek-llm": PreTokenizer(
        (
            "[\r\n]",
            rf"\s?[{_CASED}]+",
            r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _IDEOGRAPHS,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK_V3),
}
