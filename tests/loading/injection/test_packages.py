"""Families and storage formats of an installed package: equal to transformers, and refused with the package's name."""

import importlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from ktqueue.core.errors import CheckpointError
from ktqueue.families.family import GgufLayout
from ktqueue.loading import installed
from ktqueue.loading.checkpoint import CheckpointTensor
from ktqueue.loading.convert import convert
from ktqueue.loading.gguf.families import family_of_metadata
from ktqueue.loading.gguf.library import type_name
from ktqueue.loading.identity import digest_settings
from ktqueue.loading.load import LoadedModel, load_model, open_checkpoint, prepare
from ktqueue.loading.model_report import report_model
from ktqueue.loading.storage_format import packaged_format

EXPERTS = "model.layers.0.mlp.experts"
WHERE = "package exact-operators 1.0, ktqueue"
Run = Callable[..., torch.Tensor]
pytestmark = pytest.mark.usefixtures("example")


@pytest.fixture(scope="module")
def make_family(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """make_family(class, model_type, **config) -> a folder with the weights of `tiny`, and its model."""

    def make(class_name: str, model_type: str, **changes: Any) -> tuple[Path, Any]:
        package: Any = importlib.import_module("warm_moe")
        model_class = getattr(package, class_name)
        folder = tmp_path_factory.mktemp(model_type)
        values = json.loads((tiny / "config.json").read_text()) | {"model_type": model_type} | changes
        (folder / "config.json").write_text(json.dumps(values))
        for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            (folder / name).symlink_to(tiny / name)
        model = model_class(model_class.config_class.from_dict(values)).eval()
        weights = safetensors.torch.load_file(tiny / "model.safetensors")
        for layer in range(model.config.num_hidden_layers):
            prefix = f"model.layers.{layer}.mlp.experts."
            parts = {
                part: torch.stack([weights.pop(f"{prefix}{i}.{part}_proj.weight") for i in range(8)])
                for part in ("gate", "up", "down")
            }
            weights[f"{prefix}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
            weights[f"{prefix}down_proj"] = parts["down"]
        model.load_state_dict(weights)
        return folder, model

    return make


def _check(model: LoadedModel, expected: torch.Tensor, run_logits: Run) -> None:
    found = run_logits(model.module, model.kv_layout(16), [*range(3, 43)])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(3, 43)[None], output_router_logits=False).logits[0]
    return logits


def test_a_family_is_served_from_a_folder_and_from_a_gguf_file(
    make_family: Callable[..., tuple[Path, Any]], tiny: Path, tmp_path: Path, run_logits: Run
) -> None:
    folder, theirs = make_family("WarmMoeForCausalLM", "warm_moe", router_temperature=3.0)
    expected, model = _logits(theirs), load_model(str(folder), rules="exact")
    _check(model, expected, run_logits)
    assert not torch.allclose(_logits_of(tiny, run_logits), expected, atol=1e-2)  # the temperature counts
    assert {item.op for item in model.plan.replacements} == {"CpuExperts", "CpuLinear"}
    convert(folder, tmp_path / "warm.gguf", experts="f32", dense="f32")
    again = load_model(str(tmp_path / "warm.gguf"), rules="exact")
    assert again.config.router_temperature == 3.0
    _check(again, expected, run_logits)
    report = report_model(str(tmp_path / "warm.gguf"))
    assert report.refusal is None and report.facts.architecture == "WarmMoeForCausalLM"


def _logits_of(folder: Path, run_logits: Run) -> torch.Tensor:
    model = load_model(str(folder), rules="exact")
    return run_logits(model.module, model.kv_layout(16), [*range(3, 43)])


def test_the_decoders_compute_a_family_that_says_what_they_must_know(
    make_family: Callable[..., tuple[Path, Any]], run_logits: Run
) -> None:
    folder, theirs = make_family("PlainMoeForCausalLM", "plain_moe")
    model = load_model(str(folder), rules="exact")
    assert type(model.module).__name__ == "CpuDecoder"
    _check(model, _logits(theirs), run_logits)
    on_gpu = prepare(str(folder), rules=None, device="cuda", dtype=torch.bfloat16)
    assert on_gpu.refusal is None and [item.op for item in on_gpu.plan.replacements] == ["GpuDecoder"]


def test_the_digest_has_the_packages_and_their_versions(
    make_family: Callable[..., tuple[Path, Any]], tiny: Path, tmp_path: Path
) -> None:
    def settings(path: Path, rules: str | None = None) -> dict[str, Any]:
        prepared = prepare(str(path), rules=rules, device="cpu", dtype=torch.float32)
        return digest_settings(prepared.plan, dtype="float32", kv_cache_dtype="float32", packages=prepared.packages)

    folder, _ = make_family("PlainMoeForCausalLM", "plain_moe")
    assert settings(folder)["packages"] == ["exact-operators 1.0"]
    (rules := tmp_path / "rules.yaml").write_text(
        "base: modules\nrules:\n- match: {class: 'RMSNorm$'}\n  replace: {class: exact_operators:DoubleNorm}\n"
    )
    assert settings(tiny, str(rules))["packages"] == ["exact-operators 1.0"]
    assert "packages" not in settings(tiny)


def test_a_folder_in_a_packages_format_keeps_its_numbers(tiny: Path, tmp_path: Path) -> None:
    plain = safetensors.torch.load_file(tiny / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    noise = np.random.default_rng(5)
    for name, tensor in plain.items():
        module, _, part = name.rpartition(".")
        if module.endswith("_proj") and part == "weight":
            rows, columns = tensor.shape
            numbers = noise.integers(-8, 8, (rows, columns))
            scales = noise.uniform(0.01, 0.03, (rows, columns // 32)).astype(np.float16)
            codes = (numbers[:, ::2] & 15 | (numbers[:, 1::2] & 15) << 4).astype(np.uint8)
            stored |= {f"{module}.codes": torch.from_numpy(codes), f"{module}.scales": torch.from_numpy(scales)}
            values[name] = torch.from_numpy(numbers * scales.astype(np.float32).repeat(32, 1)).float()
        else:
            stored[name] = values[name] = tensor
    folder = _folder(tmp_path / "stored", tiny, stored, {"quant_method": "twos4"})
    reference = _folder(tmp_path / "values", tiny, values, None)
    checkpoint, wanted = open_checkpoint(str(folder)), open_checkpoint(str(reference))
    for name in (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj", "model.layers.1.self_attn.k_proj.weight"):
        assert checkpoint.quant(name) == "TWOS4"
        assert torch.equal(checkpoint.decode(name, torch.float32), wanted.decode(name, torch.float32))
    assert checkpoint.experts(EXPERTS).up.quant == "Q8_0"
    prepared = prepare(str(folder), rules=None, device="cpu", dtype=torch.float32)
    assert prepared.packages == ("exact-operators 1.0",) and prepared.refusal is None
    assert load_model(str(folder)).card_facts.quantization == "TWOS4"
    stored[f"{EXPERTS}.3.up_proj.codes"] = stored[f"{EXPERTS}.3.up_proj.codes"][:, :-1].contiguous()
    with pytest.raises(CheckpointError, match=rf"{EXPERTS}.3.up_proj, by {WHERE}.formats: TWOS4 = .*a row of \d+"):
        open_checkpoint(str(_folder(tmp_path / "damaged", tiny, stored, {"quant_method": "twos4"})))


def _folder(folder: Path, source: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, str] | None) -> Path:
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | ({"quantization_config": quantization} if quantization else {}))
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(source / name)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def typed_gguf(make_gguf: Callable[..., Path], tmp_path: Path) -> Path:
    """A GGUF file whose experts are said to be of type 200. Their blocks are those of Q4_0, of the same size."""
    data = bytearray(make_gguf("q4_0").read_bytes())
    for name in (
        f"blk.{layer}.ffn_{part}_exps.weight".encode() for layer in range(2) for part in ("gate", "up", "down")
    ):
        start = data.index(name) + len(name)
        start += 4 + 8 * int.from_bytes(data[start : start + 4], "little")
        assert data[start : start + 4] == struct.pack("<I", 2)
        data[start : start + 4] = struct.pack("<I", 200)
    (path := tmp_path / "typed.gguf").write_bytes(data)
    return path


def test_a_gguf_file_may_have_the_type_of_a_package(typed_gguf: Path, make_gguf: Callable[..., Path]) -> None:
    package: Any = importlib.import_module("twos_complement")
    found, raw = open_checkpoint(str(typed_gguf)), open_checkpoint(str(make_gguf("q4_0")))
    down = raw.experts(EXPERTS).down
    wanted = np.stack([package.decode(data).reshape(down.rows, down.columns) for data in down.data])
    assert found.quant(f"{EXPERTS}.down_proj") == "TWOS4"
    assert np.array_equal(found.decode(f"{EXPERTS}.down_proj", torch.float32).numpy(), wanted)
    assert report_model(str(typed_gguf)).refusal is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "TWOS"}, "the name of the format is 'TWOS', which must be the name of the entry point"),
        ({"stored_as": "Q9"}, "stored_as must be a format of our kernels, .* got 'Q9'"),
        ({"convert": None}, "a format that is stored as Q8_0 needs convert"),
        ({"stored_as": "Q6_K"}, "a block of 32 elements is no multiple of the block of Q6_K, 256"),
        ({"convert": lambda data: data}, r"\d+ numbers in Q8_0 are \d+ bytes, got \d+"),
        ({"convert": None, "stored_as": "BF16"}, "BF16 does not hold its numbers exactly"),
        ({"decode": lambda data: 1 / 0}, "ZeroDivisionError: division by zero"),
    ],
    ids=["name", "no such", "no convert", "blocks", "bytes", "rounded", "code"],
)
def test_a_format_that_is_wrong_is_named(
    changes: dict[str, Any], words: str, typed_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = importlib.import_module("twos_complement")
    installed._import.cache_clear()
    monkeypatch.setattr(package, "FORMAT", replace(package.FORMAT, **changes))
    with pytest.raises(CheckpointError, match=rf"{WHERE}.formats: TWOS4 = twos_complement:FORMAT: {words}"):
        open_checkpoint(str(typed_gguf)).experts(EXPERTS)
    installed._import.cache_clear()


def _changed(**changes: Any) -> Callable[[Any], Any]:
    return lambda package: replace(package.PLAIN, **changes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda package: package.WARM, "the config's model_type is 'warm_moe', which must be the name"),
        (lambda package: "Qwen3", "is str, not ktqueue.families.family.Family"),
        (lambda package: replace(package.PLAIN, model=package.Qwen3MoeForCausalLM), "must be a class of the package"),
        (_changed(class_name="MoeForCausalLM"), "class_name is MoeForCausalLM, but the model class is PlainMoe"),
        (
            _changed(gguf=GgufLayout("plain", (), (), loaded_as="qwen9")),
            "loaded_as is 'qwen9', which is no model_type of ktqueue",
        ),
        (_changed(latent=True), "latent is only for families of ktqueue"),
        (
            lambda package: replace(
                package.PLAIN, model=(other := package.WarmMoeForCausalLM), class_name=other.__name__, decoded=None
            ),
            "config_class",
        ),
        (_changed(decoded=None, config=type("C", (), {"model_type": "plain_moe"})), "must be a subclass of Pre"),
        (lambda package: package.MISSING, "cannot be imported: AttributeError"),
    ],
    ids=[
        "name",
        "type",
        "of transformers",
        "class name",
        "loaded as",
        "latent",
        "another config",
        "no config",
        "import",
    ],
)
def test_a_family_that_is_wrong_is_named(
    make: Callable[[Any], Any],
    words: str,
    make_family: Callable[..., tuple[Path, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = make_family("PlainMoeForCausalLM", "plain_moe")
    package: Any = importlib.import_module("warm_moe")
    installed._import.cache_clear()
    try:
        monkeypatch.setattr(package, "PLAIN", make(package))
    except AttributeError:
        monkeypatch.delattr(package, "PLAIN")
    with pytest.raises(CheckpointError, match=rf"{WHERE}.families: plain_moe = warm_moe:PLAIN.*{words}"):
        prepare(str(folder), rules=None, device="cpu", dtype=torch.float32)
    installed._import.cache_clear()


def test_names_that_exist_already_are_refused(tiny: Path, example: Path) -> None:
    entries = next(example.glob("*.dist-info")) / "entry_points.txt"
    text = entries.read_text()
    family, own_format = "qwen3_moe = warm_moe:PLAIN", "F32 = twos_complement:FORMAT"
    try:
        entries.write_text(text.replace("plain_moe = warm_moe:PLAIN", family))
        installed._entries_on.cache_clear()
        with pytest.raises(CheckpointError, match=rf"{WHERE}.families: {family}: "):
            prepare(str(tiny), rules=None, device="cpu", dtype=torch.float32)
        entries.write_text(text.replace("TWOS4 = twos_complement:FORMAT", own_format))
        installed._entries_on.cache_clear()
        with pytest.raises(CheckpointError, match=rf"{WHERE}.formats: {own_format}: ktqueue has a format F32 already"):
            open_checkpoint(str(tiny))
    finally:
        entries.write_text(text)
        installed._entries_on.cache_clear()


def test_a_broken_package_stops_only_its_own_models(typed_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is before the other ones in the order of names."""
    broken = [EntryPoint("A_BROKEN", "no_such_module:IT", f"ktqueue.{kind}") for kind in ("families", "formats")]
    monkeypatch.setattr(
        installed, "entry_points", lambda group: EntryPoints([*broken, *entry_points(group=group)]).select(group=group)
    )
    installed._entries_on.cache_clear()
    try:
        open_checkpoint(str(typed_gguf)).experts(EXPERTS)
        assert family_of_metadata({"general.architecture": "warm-moe"}, "file").model_type == "warm_moe"
        with pytest.raises(CheckpointError, match="families: A_BROKEN = no_such_module:IT cannot be imported"):
            family_of_metadata({"general.architecture": "other"}, "file")
        with pytest.raises(CheckpointError, match="formats: A_BROKEN = no_such_module:IT cannot be imported"):
            type_name(9999)
    finally:
        installed._entries_on.cache_clear()


def test_packages_are_searched_once_however_many_tensors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    def search(group: str) -> EntryPoints:
        searched.append(group)
        return entry_points(group=group)

    monkeypatch.setattr(installed, "entry_points", search)
    installed._entries_on.cache_clear()
    file = np.zeros(4, np.uint8)
    for name in "ab":
        CheckpointTensor.from_file("file", name, "F8_E4M3", (4,), 0, file, raw=True)
    assert not searched
    assert [packaged_format(name) for name in ("A", "B")] == [None, None]
    assert searched == ["ktqueue.formats"]
