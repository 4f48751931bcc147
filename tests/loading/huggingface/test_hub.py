"""Downloads from a server that speaks the hub's protocol: into the cache, once, with errors that say what to do."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants
from local_hub import TOKEN, LocalHub, local_hub

from ktqueue.core.config import EngineConfig
from ktqueue.core.errors import CheckpointError, ConfigError, KtqueueError, Unavailable
from ktqueue.core.hub_model import parse
from ktqueue.loading.huggingface.hub import SMALL_FILE, HubAccess, download
from ktqueue.loading.model_path import on_this_machine, resolve
from ktqueue.loading.model_report import report_model


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    """A local server that speaks the hub's protocol."""
    with local_hub() as server:
        yield server


@pytest.fixture
def access(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubAccess:
    """The way to the local hub, without a token, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the library reads the environment when it is imported
    return HubAccess(endpoint=hub.url, cache=str(tmp_path / "cache"), offline=False, token=False)


def pull(name: str, access: HubAccess) -> Path:
    return download(parse(name), lambda _: None, access)


def fetched(hub: LocalHub) -> list[str]:
    """Return the files whose contents were requested."""
    return [path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def test_a_file_is_downloaded_once(hub: LocalHub, access: HubAccess) -> None:
    hub.add("A/Tale", {"Tale-Q4_0.gguf": resolve("demo"), "Tale-Q8_0.gguf": b"GGUF", "README.md": b"tale"})
    path = pull("hf:A/Tale:q4_0", access)
    assert path.read_bytes() == resolve("demo").read_bytes()
    assert fetched(hub) == ["Tale-Q4_0.gguf"]
    assert pull("hf:A/Tale:Q4_0", access) == path and fetched(hub) == ["Tale-Q4_0.gguf"]
    config = on_this_machine(EngineConfig(model="hf:A/Tale:q4_0"), print, access)
    assert (config.model, config.served_model_name) == (str(path), ("Tale:q4_0",))
    hub.broken = True  # the cache is enough
    lines: list[str] = []
    assert download(parse("hf:A/Tale:q4_0"), lines.append, access) == path
    assert "503" in lines[0] and "cached" in lines[0]
    with pytest.raises(Unavailable, match=r"503.*there: hf:A/Tale has no model 'Q8_0'"):
        pull("hf:A/Tale:Q8_0", access)
    offline = replace(access, offline=True)
    hub.requests.clear()
    assert pull("hf:A/Tale", offline) == path
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE is set"):
        pull("hf:A/Other", offline)
    assert hub.requests == []


def test_only_needed_files_of_a_folder_are_downloaded(hub: LocalHub, access: HubAccess, tiny: Path) -> None:
    files = {path.name: path for path in tiny.iterdir()}
    hub.add("A/Tiny", {**files, "pytorch_model.bin": b"pickle", "modeling_tiny.py": b"code"})
    folder = pull("hf:A/Tiny", access)
    assert set(fetched(hub)) == {path.name for path in folder.iterdir()} <= files.keys()
    assert report_model(str(folder)).refusal is None


def test_a_quantised_folder_is_refused_before_its_weights(hub: LocalHub, access: HubAccess, tiny: Path) -> None:
    config = {**json.loads((tiny / "config.json").read_text()), "quantization_config": {"quant_method": "hqq"}}
    files = {path.name: path for path in tiny.iterdir()}
    hub.add("A/Tiny-HQQ", {**files, "config.json": json.dumps(config).encode()})
    with pytest.raises(CheckpointError, match=r"hf:A/Tiny-HQQ: quantization_config says .* HQQ"):
        pull("hf:A/Tiny-HQQ", access)
    assert "model.safetensors" not in fetched(hub)


def test_refusals_of_the_hub_say_what_to_do(hub: LocalHub, access: HubAccess) -> None:
    files = {"a-Q4_0.gguf": b"GGUF"}
    for name in ("A/Private", "A/Gated", "A/Open"):
        hub.add(name, dict(files))
    hub.private.add("A/Private")
    hub.gated.add("A/Gated")

    def refusal(name: str, through: HubAccess = access) -> KtqueueError:
        with pytest.raises(KtqueueError) as caught:
            pull(name, through)
        return caught.value

    for name, kind, words in (
        ("hf:A/Nowhere", ConfigError, "has no repository A/Nowhere"),
        ("hf:A/Private", ConfigError, "set HF_TOKEN"),
        ("hf:A/Gated", ConfigError, f"accept its terms at {hub.url}/A/Gated"),
    ):
        assert type(refusal(name)) is kind and words in str(refusal(name))
    assert pull("hf:A/Private", replace(access, token=TOKEN)).read_bytes() == b"GGUF"
    nowhere = refusal("hf:A/Open", replace(access, endpoint="http://127.0.0.1:1"))
    assert isinstance(nowhere, Unavailable) and "cannot be reached" in str(nowhere)


def test_the_disk_must_have_room(hub: LocalHub, access: HubAccess) -> None:
    hub.add("A/Tale", {"Tale-Q4_0.gguf": resolve("demo")})
    with pytest.raises(ConfigError, match=r"needs 18\.\d MiB in .*, which has 1\.0 MiB free") as caught:
        pull("hf:A/Tale", replace(access, free_bytes=lambda folder: 1 << 20))
    assert (caught.value.param, caught.value.limit) == ("engine.model", 1 << 20)
    assert fetched(hub) == []


def test_a_damaged_beginning_is_found_after_the_end(hub: LocalHub, access: HubAccess, tmp_path: Path) -> None:
    content = bytes(1 + SMALL_FILE)
    hub.add("A/Tale", {"Tale-Q4_0.gguf": content})
    blobs = tmp_path / "cache" / "models--A--Tale" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{hashlib.sha256(content).hexdigest()}.incomplete"
    part.write_bytes(b"no" * 1000)
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        pull("hf:A/Tale", access)
    assert not part.exists()
    assert pull("hf:A/Tale", access).read_bytes() == content


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("Qwen/Qwen3-GGUF:Q4_K_M", "give hf:Qwen/Qwen3-GGUF:Q4_K_M"),
        ("https://huggingface.co/Qwen/Qwen3/tree/main", "give hf:Qwen/Qwen3"),
        ("dem0", "did you mean demo?"),
        ("models/fox-q4.gguf", "similar: models/fox-q4_0.gguf, models/crow"),
        ("models", "give one of them: models/fox-q4_0.gguf"),
        ("empty", "no config.json"),
        ("nowhere.gguf", "hf:OWNER/NAME[:QUANT]"),
    ],
)
def test_a_path_without_a_model_says_what_to_type(
    path: str, words: str, tmp_path: Path, touch: Callable[[str], None]
) -> None:
    for name in ("models/fox-q4_0.gguf", "models/crow/config.json", "empty/notes.txt"):
        touch(name)
    with contextlib.chdir(tmp_path), pytest.raises(CheckpointError) as caught:
        on_this_machine(EngineConfig(model=path), print)
    assert words in str(caught.value)
    assert caught.value.param == "engine.model"


@pytest.fixture
def touch(tmp_path: Path) -> Callable[[str], None]:
    """Make an empty file, with its folder."""

    def make(name: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    return make
