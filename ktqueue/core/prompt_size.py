"""Whether a prompt fits a model's context: by its tokens, or before it is tokenised by its bytes."""

from ktqueue.core.errors import ContextLengthExceeded


def check_tokens(count: int, max_model_len: int, param: str = "prompt", *, at_least: bool = False) -> None:
    """Is there room for `count` prompt tokens and one more? `at_least`: the prompt may have more than `count`.

    Raises ContextLengthExceeded.
    """
    if count + 1 > max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt has "
            f"{'at least ' if at_least else ''}{count} tokens and leaves no room for a completion.",
            param=param,
            limit=max_model_len,
            value=count,
        )


def check_text(text: str, max_model_len: int, longest_token: int | None, param: str = "prompt") -> None:
    """Can a text be few enough tokens? `longest_token` in bytes; None: no limit is known, so it can.

    Raises ContextLengthExceeded.
    """
    if longest_token is None or 4 * len(text) < longest_token * max_model_len:  # a character has at most 4 bytes
        return
    size = len(text.encode(errors="surrogatepass"))
    check_tokens(-(-size // longest_token), max_model_len, param, at_least=True)
