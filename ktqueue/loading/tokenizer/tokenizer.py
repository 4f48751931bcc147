"""The tokenizer of a model, from a Hugging Face folder or a GGUF file alone: text to token ids, token ids to bytes."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ktqueue.core.errors import CheckpointError, InvalidRequest
from ktqueue.core.prompt_size import check_text, check_token_ids, check_tokens
from ktqueue.core.request import GenerationRequest
from ktqueue.core.short_repr import short_repr
from ktqueue.loading.gguf.checkpoint import read_parts
from ktqueue.loading.gguf.vocabulary import TokenKind, VocabularyData, byte_alphabet, from_metadata
from ktqueue.loading.json_file import optional_json
from ktqueue.loading.model_path import DEMO, SYNTHETIC_PREFIX, resolve
from ktqueue.loading.synthetic.checkpoint import synthetic_vocabulary
from ktqueue.loading.tokenizer import files, library
from ktqueue.loading.tokenizer.chat_template import ChatTemplate
from ktqueue.loading.tokenizer.encoded_prompt import EncodedPrompt
from ktqueue.loading.tokenizer.fill_in_middle import GapTokens, gap_tokens
from ktqueue.loading.tokenizer.template_process import other_template, render_arguments

DEMO_TEMPLATE = Path(__file__).parents[2] / "demo" / "chat_template.jinja"  # has tools, which the model's file has not
END_ROLES = ("eos", "eot", "eom")
CHARACTERS_PER_TOKEN = 6  # of the beginning that is checked; plain text has three to five

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer. Implements core.vocabulary.Vocabulary. Safe to call from several threads.

    Token ids run from 0 to `size` - 1; `eos_token_ids` end a choice. `tokens` has the text of each id, `kinds` its
    TokenKind. If `byte_level`, tokens are spelled in GPT-2's byte alphabet, otherwise in SentencePiece's. `template`,
    `gap`: the model's chat template and its tokens to fill a gap in a text, if it has them.
    """

    def __init__(
        self,
        model: library.Model,
        *,
        size: int,
        tokens: Sequence[str],
        kinds: Sequence[int],
        byte_level: bool,
        eos_token_ids: frozenset[int],
        template: ChatTemplate | None,
        gap: GapTokens | None = None,
    ) -> None:
        self._model = model
        self.size = size
        self._tokens = tokens
        self._kinds = kinds
        self._bytes_of: dict[int, bytes] = {}  # of tokens that were asked for
        self._alphabet = byte_alphabet() if byte_level else None
        self.eos_token_ids = eos_token_ids
        self.template = template
        self._gap = gap

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, if the model has one."""
        return self.template.source if self.template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens that are spelled out in the text count as such.

        Raises InvalidRequest for text that cannot be encoded as UTF-8.
        """
        _check_characters(text)
        return library.encode(self._model, text, add_special_tokens=add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of `text` alone, without the special tokens at the beginning of a prompt."""
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens, which plain text never makes, by how they are spelled."""
        return {self._tokens[i]: i for i, kind in enumerate(self._kinds[: self.size]) if kind == TokenKind.CONTROL}

    @property
    def largest_id(self) -> int:
        """The largest id that has a token: `size` or more if the tokenizer has tokens that the model does not have."""
        return max((i for i, kind in enumerate(self._kinds) if kind != TokenKind.UNUSED), default=-1)

    def fit(self, embeddings: int, ends: Collection[int] = ()) -> None:
        """Leave out the ids that a model with so many embeddings does not have. Its `ends` end a choice, too."""
        self.size = min(self.size, embeddings)
        self.eos_token_ids = frozenset(i for i in self.eos_token_ids.union(ends) if 0 <= i < self.size)

    @cached_property
    def longest_token(self) -> int | None:
        """The largest number of bytes of text per token; None if the tokenizer may drop text or join it."""
        shrinkage = library.shrinkage(self._model)
        if shrinkage is None:
            return None
        # The spelling of a token has at least as many bytes as its text, so only the longest spellings are examined.
        spellings = sorted(
            ((len(token.encode()), token_id) for token_id, token in enumerate(self._tokens)), reverse=True
        )
        longest = 1
        for size, token_id in spellings:
            if size <= longest:
                break
            longest = max(longest, len(self.token_bytes(token_id)) or size)
        return shrinkage * longest

    def encode_request(
        self,
        request: GenerationRequest,
        *,
        max_model_len: int | None = None,
        render: Callable[[GenerationRequest], str] | None = None,
    ) -> EncodedPrompt:
        """Return the prompt: the messages through the chat template, the text, or the token ids of the request.

        `max_model_len` is in tokens. A text with too many bytes to fit is not tokenised, unless it is to be truncated.
        Of a long text only the beginning is tokenised if that alone has too many tokens. `render` replaces the method
        `render`. Raises InvalidRequest that names the field, ContextLengthExceeded.
        """
        text = ""
        if request.prompt_token_ids is not None:
            check_token_ids(request.prompt_token_ids, self.size)
            token_ids = list(request.prompt_token_ids)
        else:
            field = "messages" if request.prompt is None else "prompt"
            text = request.prompt if request.prompt is not None else (render or self.render)(request)
            if max_model_len is not None and request.truncate_prompt_tokens is None:
                check_text(text, max_model_len, self.longest_token, field)
                self._check_beginning(text, max_model_len, field)
            special = request.prompt is not None if request.add_special_tokens is None else request.add_special_tokens
            if request.suffix is None or (not request.suffix and self._gap is None):
                token_ids = self.encode(text, special)
            else:
                token_ids = self._around_gap(text, request.suffix, special)
            self._check_in_vocabulary(token_ids, field)
        whole = len(token_ids)
        if request.truncate_prompt_tokens is not None:
            token_ids = token_ids[-request.truncate_prompt_tokens :]
        is_text_needed = request.return_prompt or request.prompt_only
        if len(token_ids) < whole or request.suffix is not None or (is_text_needed and not text):
            text = self.decode(token_ids)
        pieces = tuple(map(self.special_token_bytes, token_ids)) if request.return_pieces else ()
        return EncodedPrompt(token_ids, text, self._spellings(request.sampling.bad_words), pieces)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens spelled out. Invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.special_token_bytes, token_ids)).decode(errors="replace")

    def _around_gap(self, prompt: str, suffix: str, add_special_tokens: bool) -> list[int]:
        """The token ids that ask for the text between `prompt` and `suffix`."""
        if self._gap is None:
            raise InvalidRequest(
                "suffix needs a model with tokens for filling in the middle, which this model does not have",
                param="suffix",
            )
        before, after = self.encode(prompt, add_special_tokens=False), self.encode(suffix, add_special_tokens=False)
        self._check_in_vocabulary(after, "suffix")
        return [*self.encode("", add_special_tokens), *self._gap.prompt(before, after)]

    def _spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word, at the beginning of a text and after a space, as vLLM encodes `bad_words`."""
        texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        return tuple(dict.fromkeys(ids for text in texts if (ids := tuple(self.encode(text, False)))))

    def _check_beginning(self, text: str, max_model_len: int, field: str) -> None:
        beginning = text[: CHARACTERS_PER_TOKEN * max_model_len]
        if self.longest_token is not None and len(text) > 2 * len(beginning):
            _check_characters(text)
            check_tokens(library.min_tokens(self._model, beginning), max_model_len, field, at_least=True)

    def render(self, request: GenerationRequest) -> str:
        """Return the prompt text of a request with messages. Raises InvalidRequest."""
        messages, tools, kwargs, options = render_arguments(request)
        if request.chat_template is not None:
            template = other_template(self.template, request.chat_template)
        elif self.template is not None:
            template = self.template
        else:
            raise InvalidRequest("the model has no chat template: send prompt instead of messages", param="messages")
        return template.render(messages or (), tools, kwargs, **options)

    def _check_in_vocabulary(self, ids: list[int], param: str) -> None:
        """Check the ids against `size`: some tokenizers have more tokens than their model."""
        if ids and (largest := max(ids)) >= self.size:
            token, last = self._tokens[largest], self.size - 1
            raise InvalidRequest(
                f"{param} contains {token!r}, a token that the model does not have: its id is {largest}, but the "
                f"model's go to {last}",
                param=param,
                limit=last,
                value=token,
            )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; empty for special tokens and for ids without a token."""
        known = self._bytes_of.get(token_id)
        if known is None:
            if not 0 <= token_id < len(self._tokens):
                return b""
            known = self._bytes_of[token_id] = self._make_bytes(token_id)
        return known

    def _make_bytes(self, token_id: int) -> bytes:
        token, kind = self._tokens[token_id], self._kinds[token_id]
        if kind == TokenKind.USER_DEFINED:
            return (token if self._alphabet else token.replace(library.SPACE, " ")).encode()
        if kind == TokenKind.BYTE:
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else b""
        if kind != TokenKind.NORMAL:
            return b""
        if self._alphabet is None:
            return token.replace(library.SPACE, " ").encode()
        try:
            return bytes([self._alphabet[character] for character in token])
        except KeyError:  # a token of a byte-level vocabulary that is spelled as plain text
            return token.encode()

    def special_token_bytes(self, token_id: int) -> bytes:
        """Return the same as `token_bytes`, but a special token is spelled out. Ids without a token stay empty."""
        if 0 <= token_id < len(self._tokens) and self._kinds[token_id] in (TokenKind.CONTROL, TokenKind.UNKNOWN):
            return self._tokens[token_id].encode()
        return self.token_bytes(token_id)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the text contains a lone surrogate, which is not a character", param="prompt") from error


def load_served_tokenizer(model: str, other: str | None, embeddings: int) -> Tokenizer:
    """Load what a worker serves a model with: its own tokenizer, or `other`, which the model's ids limit.

    `embeddings`: number of those of the model. A choice ends also where the model's files say. Raises CheckpointError.
    """
    tokenizer = load_tokenizer(other or model)
    tokenizer.fit(embeddings, () if other is None else _stated_ends(model))
    return tokenizer


def _stated_ends(model: str) -> list[int]:
    """The ids that end a choice, as a model's files say besides those of a tokenizer."""
    if model.startswith(SYNTHETIC_PREFIX):
        return []
    found = resolve(model)
    if found.is_dir():
        return files.end_tokens(found, {}, (), files.MAX_TOKENS)
    metadata = read_parts(found)[0].metadata
    stated = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in END_ROLES)
    return [token_id for token_id in stated if isinstance(token_id, int)]


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder, a .gguf file, `demo` or a synthetic model.

    A folder has a tokenizer.json, tiktoken.model, tokenizer.model or tekken.json. Raises CheckpointError.
    """
    if path.startswith(SYNTHETIC_PREFIX):
        return from_data(synthetic_vocabulary(path), path)
    found = resolve(path)
    if found.is_dir():
        return _from_folder(found)
    return _from_gguf(found, DEMO_TEMPLATE.read_text(encoding="utf-8") if path == DEMO else None)


def _from_gguf(path: Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a file. `chat_template` replaces that of the file."""
    parts = read_parts(path)
    data = from_metadata(parts[0].metadata, str(path))
    if chat_template is not None:
        data = replace(data, chat_template=chat_template)
    for rows in (info.shape[0] for part in parts for info in part.tensors if info.name == "token_embd.weight"):
        if rows < len(data.tokens):
            raise CheckpointError(f"{path}: {len(data.tokens)} tokens, but 'token_embd.weight' has {rows} rows")
    return from_data(data, str(path))


def from_data(data: VocabularyData, path: str) -> Tokenizer:
    """Make the tokenizer of a vocabulary. `path` names it in errors. Raises CheckpointError."""
    special = {f"{role}_token": data.tokens[token_id] for role, token_id in data.ids.items()}
    return Tokenizer(
        library.build(data, path),
        size=len(data.tokens),
        tokens=data.tokens,
        kinds=data.kinds,
        byte_level=data.model == "gpt2",
        eos_token_ids=frozenset(data.ids[role] for role in END_ROLES if role in data.ids),
        template=ChatTemplate(data.chat_template, special, path) if data.chat_template else None,
        gap=gap_tokens(data.tokens, data.ids),
    )


def _from_folder(folder: Path) -> Tokenizer:
    config = optional_json(folder / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) and text else config).get("vocab_size")
    if size is not None and (type(size) is not int or size < 1):
        raise CheckpointError(f"{folder / 'config.json'}: vocab_size must be a positive number, got {short_repr(size)}")
    if (plain := files.plain_vocabulary(folder, size or 0)) is not None:
        return from_data(plain, str(folder))
    file = files.read_tokenizer(folder)
    settings = optional_json(folder / "tokenizer_config.json")
    size = size or len(file.tokens)
    ends = files.end_tokens(folder, settings, file.tokens, size)
    template = files.chat_template(folder, settings)
    return Tokenizer(
        library.from_json(file.path, file.document),
        size=size,
        tokens=file.tokens,
        kinds=file.kinds,
        byte_level=file.byte_level,
        eos_token_ids=frozenset(ends),
        template=ChatTemplate(template, files.special_tokens(settings), str(folder)) if template else None,
        gap=gap_tokens(file.tokens, {}),
    )
