"""The meaning of a name on the Hugging Face hub: the repository, its files, and the name for clients."""

import pytest

from ktqueue.core.errors import ConfigError
from ktqueue.core.hub_model import HubModel, parse, served_name
from ktqueue.loading.huggingface.hub_files import HubFile, select

GGUF = [
    "README.md",
    "mmproj-Fox-F16.gguf",
    "imatrix.gguf",
    "Fox-30B-Q4_K_M.gguf",
    "Fox-30B-UD-Q4_K_XL.gguf",
    "fox-30b-q8_0.gguf",
    "BF16/Fox-30B-BF16-00001-of-00002.gguf",
    "BF16/Fox-30B-BF16-00002-of-00002.gguf",
    "UD-Q2/Fox-30B-IQ2_XXS-00002-of-00003.gguf",
]
FOLDER = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "model.pt",
    "modeling_fox.py",
    "onnx/model.safetensors",
]


def chosen(name: str, paths: list[str]) -> tuple[str, list[str]]:
    selection = select(parse(name), [HubFile(path, 1000) for path in paths])
    return selection.entry, [file.path for file in selection.files]


@pytest.mark.parametrize(
    ("variant", "entry"),
    [
        ("Q4_K_M", "Fox-30B-Q4_K_M.gguf"),
        ("q4_k_m", "Fox-30B-Q4_K_M.gguf"),
        ("ud-q4_k_xl", "Fox-30B-UD-Q4_K_XL.gguf"),
        ("Q8_0", "fox-30b-q8_0.gguf"),
        ("Fox-30B-Q4_K_M.gguf", "Fox-30B-Q4_K_M.gguf"),
        ("Fox-30B-Q4_K_M", "Fox-30B-Q4_K_M.gguf"),
    ],
)
def test_a_gguf_file_is_named_by_its_quantisation_or_path(variant: str, entry: str) -> None:
    assert chosen(f"hf:A/Fox-GGUF:{variant}", GGUF) == (entry, [entry])


@pytest.mark.parametrize("variant", ["bf16", "BF16/Fox-30B-BF16-00001-of-00002.gguf", "BF16/Fox-30B-BF16"])
def test_all_parts_of_a_split_model_are_chosen(variant: str) -> None:
    entry, files = chosen(f"hf:A/Fox-GGUF:{variant}", GGUF)
    assert (entry, files) == (GGUF[6], GGUF[6:8])


@pytest.mark.parametrize(
    "shard", ["model-0000{}-of-00002", "model-{}-of-2", "model.safetensors-0000{}-of-00002", "model-{}"]
)
def test_only_the_files_that_a_folder_needs_are_chosen(shard: str) -> None:
    """Pickles, code and weights in another layout are left out."""
    weights = [f"{shard.format(number)}.safetensors" for number in (1, 2)]
    others = ["chat_template.json", "additional_chat_templates/tool_use.jinja"]
    entry, files = chosen("hf:A/Fox", [*FOLDER[:5], *weights, *FOLDER[7:], *others, "other/config.json"])
    assert (entry, set(files)) == ("", {*FOLDER[:5], *weights, *others})
    assert files[-2:] == weights  # they come last
    single = [*FOLDER, "model.safetensors"]
    assert chosen("hf:A/Fox", single)[1] == [*sorted(FOLDER[:4]), "model.safetensors"]
    assert chosen("hf:A/Fox:safetensors", [*GGUF, *FOLDER])[0] == ""


@pytest.mark.parametrize(
    ("name", "paths", "words"),
    [
        ("hf:A/Fox", GGUF, ["more than one", "hf:A/Fox:Q4_K_M  1000 B", "hf:A/Fox:BF16  2.0 KiB"]),
        ("hf:A/Fox", [*FOLDER, GGUF[3]], ["hf:A/Fox:safetensors", "hf:A/Fox:Q4_K_M"]),
        ("hf:A/Fox:Q5_K", GGUF, ["has no model 'Q5_K'", "hf:A/Fox:UD-Q4_K_XL"]),
        ("hf:A/Fox:F16", GGUF, ["has no model 'F16'"]),  # the F16 file is the projector for images
        ("hf:A/Fox:IQ2_XXS", GGUF, ["parts [1, 3] of 3 are missing"]),
        ("hf:A/Fox", FOLDER[:6], ["parts [2] of 2 are missing"]),
        (
            "hf:A/Fox",
            [name for name in FOLDER if name != "tokenizer.json"],
            ["no tokenizer.json or tiktoken.model or tokenizer.model or tekken.json"],
        ),
        ("hf:A/Fox", ["config.json", "pytorch_model.bin"], ["neither .gguf files nor", "pickled"]),
        ("hf:A/Fox", ["a-Q4_0.gguf", "b-Q4_0.gguf"], ["hf:A/Fox:a-Q4_0.gguf", "hf:A/Fox:b-Q4_0.gguf"]),
    ],
)
def test_an_ambiguous_name_is_refused_with_the_choices(name: str, paths: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(name, paths)
    assert caught.value.param == "engine.model"
    for word in words:
        assert word in str(caught.value)
    assert "mmproj" not in str(caught.value)


@pytest.mark.parametrize("name", ["hf:", "hf:Fox", "hf:A/B/C", "hf:../B", "hf:A/B:", "hf:A/.."])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="hf:OWNER/NAME:QUANT"):
        parse(name)


def test_clients_use_a_short_name() -> None:
    assert served_name("hf:A/Fox-GGUF:q4_k_m") == "Fox-GGUF:q4_k_m"
    assert served_name("hf:A/Fox") == "Fox"
    assert parse("hf:A/Fox:BF16/Fox-BF16-00001-of-00002.gguf").served_name == "Fox:Fox-BF16"
    assert served_name("demo") == "demo"
    assert str(HubModel("A/Fox", "Q4_0")) == "hf:A/Fox:Q4_0"
