"""Tokens with which a model fills a gap in a text, and the prompt that asks for it.

The names are those that llama.cpp knows: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROLES = ("fim_pre", "fim_suf", "fim_mid")
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek-Coder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
)


@dataclass(frozen=True, slots=True)
class GapTokens:
    """Ids of the tokens before the text, before the text after the gap, and before the answer."""

    prefix: int
    suffix: int
    middle: int

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The prompt's token ids for a gap between two texts."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


def gap_tokens(tokens: Sequence[str], ids: Mapping[str, int]) -> GapTokens | None:
    """Find the tokens of a vocabulary, by `ids` of ROLES or else by name. None: the model cannot fill gaps."""
    if all(role in ids for role in ROLES):
        return GapTokens(*(ids[role] for role in ROLES))
    wanted = {name for names in _NAMES for name in names}
    found = {token: token_id for token_id, token in enumerate(tokens) if token in wanted}
    for names in _NAMES:
        if all(name in found for name in names):
            return GapTokens(*(found[name] for name in names))
    return None
