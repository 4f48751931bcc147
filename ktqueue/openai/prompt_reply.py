"""The prompt in answers: its log probabilities in vLLM's form, and as the beginning of a completion's lists."""

import codecs
from collections.abc import Iterator

from ktqueue.core.codec import Json
from ktqueue.core.events import PositionLogprobs, PromptPart, TokenLogprob
from ktqueue.openai.endpoint import ReplyHead


def prompt_ids(head: ReplyHead, prompt: PromptPart | None) -> Json:
    """`prompt_token_ids` if the request asked for token ids and `prompt` has them, else nothing."""
    return {"prompt_token_ids": prompt.token_ids} if prompt is not None and head.wants("token_ids") else {}


def prompt_logprobs(head: ReplyHead, prompt: PromptPart | None) -> Json:
    """`prompt_logprobs` if the request asked for it: for each token null or an object by token id, as vLLM has it.

    Source: https://docs.vllm.ai/en/latest/api/vllm/logprobs/. `rank` is null if it is not among the likeliest tokens.
    """
    if prompt is None or not head.wants("prompt_logprobs"):
        return {}
    return {"prompt_logprobs": [None if entry is None else _by_id(head, entry) for entry in prompt.logprobs]}


def _by_id(head: ReplyHead, entry: PositionLogprobs) -> Json:
    ranked: dict[int, tuple[int | None, TokenLogprob]] = {
        token.token_id: (rank, token) for rank, token in enumerate(entry.top, 1)
    }
    ranked.setdefault(entry.chosen.token_id, (None, entry.chosen))
    return {
        str(token_id): {"logprob": token.logprob, "rank": rank, "decoded_token": head.token_name(token)}
        for token_id, (rank, token) in ranked.items()
    }


def prompt_positions(head: ReplyHead, prompt: PromptPart) -> Iterator[tuple[str, int, PositionLogprobs | None]]:
    """Name, place in characters and log probabilities of each token of a prompt.

    The first token has no log probabilities, so its text is what the others leave of the prompt's text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offset = 0
    whole = prompt.text.encode(errors="surrogatepass")
    rest = sum(len(entry.chosen.token_bytes) for entry in prompt.logprobs if entry is not None)
    for place, entry in enumerate(prompt.logprobs, 1):
        token_bytes = whole[: max(0, len(whole) - rest)] if entry is None else entry.chosen.token_bytes
        text = decoder.decode(token_bytes, final=place == len(prompt.logprobs))
        chosen = TokenLogprob(prompt.token_ids[place - 1], token_bytes, 0.0) if entry is None else entry.chosen
        yield head.token_name(chosen, text), offset, entry
        offset += len(text)
