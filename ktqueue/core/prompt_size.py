"""Checks that a prompt fits a model: its tokens the vocabulary, their number or the text's bytes the context."""

from collections.abc import Sequence

from ktqueue.core.errors import ContextLengthExceeded, InvalidRequest


def check_tokens(count: int, max_model_len: int, param: str = "prompt", *, at_least: bool = False) -> None:
    """Check that `count` prompt tokens and one more fit. `at_least`: the prompt may have more tokens than `count`.

    Raises ContextLengthExceeded.
    """
    if count + 1 > max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, {'at least ' if at_least else ''}"
            f"{count} tokens are in the {param}, which leaves no room for a completion.",
            param=param,
            limit=max_model_len,
            value=count,
        )


def check_text(text: str, max_model_len: int, longest_token: int | None, param: str = "prompt") -> None:
    """Check that a text can be few enough tokens. `longest_token` is in bytes; None: unknown, so nothing is checked.

    Raises ContextLengthExceeded.
    """
    if longest_token is None or 4 * len(text) < longest_token * max_model_len:  # a character has at most 4 bytes
        return
    size = len(text.encode(errors="surrogatepass"))
    check_tokens(-(-size // longest_token), max_model_len, param, at_least=True)


def check_token_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Check that the token ids of a prompt, which are not negative, are in the vocabulary. Raises InvalidRequest."""
    if not ids or max(ids) < vocab_size:
        return
    position = next(position for position, token_id in enumerate(ids) if token_id >= vocab_size)
    raise InvalidRequest.must_be(
        f"prompt_token_ids[{position}]", f"below {vocab_size}", ids[position], limit=vocab_size - 1
    )
