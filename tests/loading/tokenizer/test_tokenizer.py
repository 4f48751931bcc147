"""Tokenizers: ids as from the models' own tokenizers, exact bytes, requests to ids, errors by field."""

import base64
import json
import lzma
import random
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers

from ktqueue.core.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from ktqueue.core.request import GenerationRequest
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.header import read_header
from ktqueue.loading.gguf.vocabulary import VocabularyData, from_metadata, to_metadata
from ktqueue.loading.model_path import resolve
from ktqueue.loading.tokenizer import library
from ktqueue.loading.tokenizer.chat_template import ChatTemplate
from ktqueue.loading.tokenizer.encoded_prompt import EncodedPrompt
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer

IM_END = "<|im_end|>"  # the tokenizer's eos_token
ODD_TEXTS = [
    "",
    " ",
    "\r\n\r\n  \t x",
    "e\u0301 \u1e9b\u0323 A\u030a",  # NFC changes all of these
    "\N{LLAMA}\N{ROCKET} \U0001f636\u200d\U0001f32b\ufe0f",
    "\u200b\ufeff\x00\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>{}",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0e44\u0e17\u0e22",
    "\u00bd \u00b2 \u2167 12345 007",
    "it's HE'LL don't 'S",
    "[UNUSED380]",
]


@pytest.mark.parametrize("name", ["qwen2", "deepseek-llm", "gpt-2", "llama-spm"])
def test_ids_equal_those_of_real_vocabularies(name: str, shared_data: Path, tmp_path: Path) -> None:
    stem = shared_data / "vocab" / f"ggml-vocab-{name}.gguf"
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(lzma.decompress(Path(f"{stem}.xz").read_bytes()))
    tokenizer = load_tokenizer(str(path))
    texts = Path(f"{stem}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{stem}.out").read_text().splitlines()
    assert len(lines) == 46 and len(texts) in (46, 47)
    for text, line in zip(texts, lines, strict=False):
        expected = [int(number) for number in line.split()]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == expected, repr(text)
        joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        prefix = b" " if name == "llama-spm" and text else b""
        assert joined == prefix + text.encode()


def test_beginning_token_is_added_where_the_file_says_so(shared_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "spm.gguf"
    path.write_bytes(lzma.decompress((shared_data / "vocab" / "ggml-vocab-llama-spm.gguf.xz").read_bytes()))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("Hello") == [1, *tokenizer.encode("Hello", add_special_tokens=False)]
    assert [tokenizer.token_bytes(i) for i in (0, 1, 2, 3, 258, 15043)] == [b"", b"", b"", b"\0", b"\xff", b" Hello"]
    assert tokenizer.eos_token_ids == {2} and tokenizer.chat_template is None


def test_a_gguf_file_alone_equals_the_folder(tiny: Path, tiny_gguf: Path) -> None:
    folder, file = load_tokenizer(str(tiny)), load_tokenizer(str(tiny_gguf))
    for text in ODD_TEXTS:
        ids = folder.encode(text)
        assert file.encode(text) == ids, repr(text)
        assert [file.token_bytes(i) for i in ids] == [folder.token_bytes(i) for i in ids]
    assert file.size == folder.size == 384
    assert file.eos_token_ids == folder.eos_token_ids == {382, *folder.encode(IM_END)}
    assert file.chat_template == folder.chat_template


def test_the_demo_model_equals_its_own_tokenizer(shared_data: Path) -> None:
    folder, demo = load_tokenizer(str(shared_data / "demo-model")), load_tokenizer("demo")
    tales = lzma.decompress((shared_data / "corpus" / "tales.txt.xz").read_bytes()).decode()
    for text in [*ODD_TEXTS, tales[:300_000], tales[-100_000:]]:
        assert demo.encode(text) == folder.encode(text)
    for messages in ([{"role": "user", "content": "Tell me a story."}],):
        request = GenerationRequest(model="demo", messages=tuple(messages))
        assert demo.encode_request(request) == folder.encode_request(request)
    assert demo.size == folder.size == 8192 and demo.eos_token_ids == folder.eos_token_ids == {8191}


def test_bytes_rebuild_any_text() -> None:
    tokenizer = load_tokenizer("demo")
    for text in ODD_TEXTS[4:6] + ODD_TEXTS[7:]:
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == text


def test_other_threads_run_while_a_long_text_is_tokenised() -> None:
    """A worker must run steps and send heartbeats meanwhile.

    With this switch interval a thread runs only if another one releases the interpreter's lock by itself.
    """
    tokenizer = load_tokenizer("demo")
    turns, over = 0, False
    running = threading.Event()

    def turn() -> None:
        nonlocal turns
        while not over:
            running.set()
            time.sleep(0)
            turns += 1

    thread = threading.Thread(target=turn)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        running.wait()
        before = turns
        tokenizer.encode("\N{LLAMA}" * 100_000)
        assert turns > before
    finally:
        over = True
        sys.setswitchinterval(interval)
        thread.join()


def test_special_unused_and_unknown_ids_have_no_bytes(tiny_gguf: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_gguf))
    (tool_call,) = tokenizer.encode("<tool_call>")
    assert tokenizer.token_bytes(tool_call) == b"<tool_call>"  # added but not special, so it is text
    assert tokenizer.token_bytes(382) == b""
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(384) == tokenizer.token_bytes(1 << 40) == b""


def test_requests_become_token_ids() -> None:
    tokenizer = load_tokenizer("demo")
    chat = GenerationRequest(model="demo", messages=({"role": "user", "content": "Hi"},))
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_request(chat) == EncodedPrompt(tokenizer.encode(rendered), rendered)
    once = GenerationRequest(model="demo", prompt="Once")
    assert tokenizer.encode_request(once) == EncodedPrompt(tokenizer.encode("Once"), "Once")
    ids = GenerationRequest(model="demo", prompt_token_ids=(5, 6))
    assert tokenizer.encode_request(ids) == EncodedPrompt([5, 6], "")


def test_wrong_requests_are_refused() -> None:
    tokenizer = load_tokenizer("demo")
    with pytest.raises(InvalidRequest, match=r"prompt_token_ids\[1\] must be below 8192, got 8192") as caught:
        tokenizer.encode_request(GenerationRequest(model="demo", prompt_token_ids=(5, 8192)))
    assert (caught.value.param, caught.value.limit, caught.value.value) == ("prompt_token_ids[1]", 8191, 8192)
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.encode_request(GenerationRequest(model="demo", prompt="\ud800"))


def test_messages_need_a_chat_template(tiny: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    tokenizer = load_tokenizer(str(tmp_path))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.encode_request(GenerationRequest(model="m", messages=({"role": "user", "content": "Hi"},)))
    assert caught.value.param == "messages"


def test_end_tokens_come_from_the_generation_config_and_the_tokenizer(tiny: Path, tmp_path: Path) -> None:
    """A model that was tuned for another chat template often keeps an old generation_config.json."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [382, 380]}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.eos_token_ids == {382, 380, *tokenizer.encode(IM_END)}


@pytest.mark.parametrize("stated", [-1, 384, True, [10**6, -1, None]])
def test_end_tokens_that_the_model_does_not_have_are_ignored(stated: object, tiny: Path, tmp_path: Path) -> None:
    """The next file decides instead, and the model can be converted."""
    shutil.copytree(tiny, tmp_path / "tiny")
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    convert(tmp_path / "tiny", tmp_path / "model.gguf", experts="f16")
    for path in (tmp_path / "tiny", tmp_path / "model.gguf"):
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.eos_token_ids == {382, *tokenizer.encode(IM_END)}


PLAIN = "{{ messages[0].content }}{% if x %}\nx{% endif %}"
CALLS = "{{ tools[0].function.name }}: {{ messages[0].content }}"


@pytest.mark.parametrize("where", ["list", "files", "legacy", "gguf"])
def test_another_chat_template_may_be_for_tools(where: str, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, folder := tmp_path / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    if where == "list":
        settings["chat_template"] = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": CALLS}]
    elif where == "legacy":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    else:
        (folder / "chat_template.jinja").write_text(PLAIN)
    if where in ("files", "legacy"):
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(CALLS)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = load_tokenizer(str(folder)).template
    if where == "gguf":
        stored = {"tokenizer.chat_template": PLAIN, "tokenizer.chat_template.tool_use": CALLS}
        metadata = to_metadata(VocabularyData(model="gpt2", pre="gpt-2", tokens=["a"], kinds=[1]))
        template = ChatTemplate(from_metadata(metadata | stored, "file").chat_template or "", {}, "file")
    assert template is not None
    messages, tool = [{"role": "user", "content": "Hi"}], {"type": "function", "function": {"name": "look"}}
    assert template.render(messages) == "Hi" and template.render(messages, [tool]) == "look: Hi"


def test_a_chat_template_that_is_not_a_text(tiny: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: 'utf-8' codec can't decode"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"qwen2", b"qwen9", "tokenizer.ggml.pre 'qwen9' is not supported; known: default, gpt-2, .* qwen2"),
        (b"gpt2", b"bert", "tokenizer.ggml.model 'bert' is not supported; known: gpt2, llama"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz", "tokenizer.ggml.tokens is missing"),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez", "tokenizer.ggml.merges is missing"),
    ],
)
def test_unusable_vocabularies_are_refused(old: bytes, new: bytes, words: str, tiny_gguf: Path, tmp_path: Path) -> None:
    assert "tokenizer.ggml.pre" in read_header(tiny_gguf).metadata
    path = tmp_path / "odd.gguf"
    path.write_bytes(tiny_gguf.read_bytes().replace(old, new, 1))
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(str(path))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json: No such file"):
        load_tokenizer(str(tmp_path))


def test_tokens_that_the_model_does_not_have_are_refused(tiny: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 290}))
    tokenizer = load_tokenizer(str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"messages contains '.*', a token that the model does not have"):
        tokenizer.encode_request(GenerationRequest(model="m", messages=({"role": "user", "content": "Hi"},)))
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": "many"}))
    with pytest.raises(CheckpointError, match=r"config.json: vocab_size must be a positive number, got 'many'"):
        load_tokenizer(str(tmp_path))
    raw = tiny_gguf.read_bytes()
    position = raw.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 8
    (tmp_path / "few.gguf").write_bytes(raw[:position] + (200).to_bytes(8, "little") + raw[position + 8 :])
    with pytest.raises(CheckpointError, match=r"384 tokens, but 'token_embd.weight' has 200 rows"):
        load_tokenizer(str(tmp_path / "few.gguf"))


def test_no_text_has_fewer_tokens_than_its_bytes_imply() -> None:
    tokenizer = load_tokenizer("demo")
    longest = tokenizer.longest_token
    assert longest is not None
    by_length = sorted(range(tokenizer.size), key=lambda token_id: len(tokenizer.token_bytes(token_id)))
    best = tokenizer.token_bytes(by_length[-1]).decode()
    for text in (best * 200, "e\u0301" * 500, " " * 3_000, "<|endoftext|>" * 100, "\U0001f98a" * 50, "\n\t" * 700):
        assert len(text.encode()) <= longest * len(tokenizer.encode(text))


def demo_model() -> library.Model:
    metadata = read_header(resolve("demo")).metadata
    return library.build(from_metadata(metadata, "demo"), "demo")


def test_a_beginning_has_no_more_tokens_than_the_whole() -> None:
    model = demo_model()
    draw = random.Random(3)
    pieces = ["Once", "  ", "\n", "e\u0301", "<|im_end|>", "<|im", "1234", "'s", " the", "\U0001f98a", "\u0301", "\r"]
    counted = 0
    for _ in range(300):
        text = "".join(draw.choices(pieces, k=120))
        least = library.min_tokens(model, text[: draw.randrange(len(text))])
        assert least <= len(library.encode(model, text, add_special_tokens=True))
        counted += least
    assert counted > 10_000


def test_a_long_text_is_refused_by_its_beginning() -> None:
    tokenizer = load_tokenizer("demo")
    request = GenerationRequest(model="demo", prompt="Once upon a time. " * 500)
    with pytest.raises(ContextLengthExceeded, match="at least") as caught:
        tokenizer.encode_request(request, max_model_len=512)
    tokens = caught.value.value  # of the beginning; the whole text has more
    assert isinstance(tokens, int) and 512 <= tokens < 1_500
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode_request(replace(request, prompt="Once " * 2_000 + "\ud800"), max_model_len=512)


@pytest.mark.parametrize(
    "normalizer",
    [normalizers.Strip(), normalizers.NFKC(), normalizers.Replace("  ", " "), normalizers.Replace(Regex(" +"), " ")],
)
def test_a_tokenizer_that_may_shorten_texts_has_no_bound(normalizer: normalizers.Normalizer) -> None:
    model = demo_model()
    assert library.shrinkage(model) is not None
    model.normalizer = normalizer
    assert library.shrinkage(model) is None


def test_a_normaliser_that_may_make_a_text_huge_is_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    growing = {"type": "Replace", "pattern": {"String": "l"}, "content": "l" * 1_000}
    document["normalizer"] = {"type": "Sequence", "normalizers": [growing] * 5}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the normalizer may make a text 10{15} times longer"):
        load_tokenizer(str(tmp_path))


def charsmap(data: bytes) -> dict[str, Any]:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "x" * 100_000}, "Unknown tokenizer version 'xxx"),
        (charsmap(b"\xff" * 300), r"the normalizer is damaged: .*charsmap of 300 bytes states a trie of 4294967295"),
        (charsmap(bytes(300)), r"the normalizer is damaged: .*charsmap of 300 bytes states a trie of 0"),
        (charsmap(b"\4\0\0\0trie" + b"x" * 65), r"the normalizer is damaged: .*a text of 65 bytes; at most 64"),
        (charsmap(b"\3\0\0\0tri"), "index out of bounds"),
    ],
)
def test_a_damaged_tokenizer_file_is_one_short_error(
    changes: dict[str, Any], words: str, tiny: Path, tmp_path: Path
) -> None:
    """The library panics, or allocates the size that is stated."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | changes))
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*{words}") as caught:
        load_tokenizer(str(tmp_path))
    assert len(str(caught.value)) < 500


def test_a_name_of_a_template_that_is_no_text_is_ignored(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    named = [{"name": [], "template": "wrong"}, {"name": "default", "template": "right"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(str(tmp_path)).chat_template == "right"


def test_a_text_config_that_is_no_object_is_ignored(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": [7]}))
    assert load_tokenizer(str(tmp_path)).size == 384


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        *((key, "false", "true or false") for key in ("add_bos_token", "add_eos_token", "add_space_prefix")),
        ("add_bos_token", 1, "true or false"),
        ("eos_token_id", "8191", "an integer"),
        ("padding_token_id", True, "an integer"),
        ("pre", 7, "a text"),
        ("tokens", "a b c", "a list"),
    ],
)
def test_metadata_of_another_type_is_refused(key: str, value: object, wanted: str) -> None:
    metadata = {**read_header(resolve("demo")).metadata, f"tokenizer.ggml.{key}": value}
    with pytest.raises(
        CheckpointError, match=f"file: metadata key tokenizer.ggml.{key} must be {wanted}, got {value!r}"
    ):
        from_metadata(metadata, "file")
