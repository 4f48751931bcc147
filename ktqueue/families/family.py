"""The description of a model family: what transformers calls it, what its layers compute, and how GGUF files hold it.

Our own families and those of packages are described alike: see docs/guides/families.md.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

EXPERT_KEY = "expert_count"
"""The metadata key, after `{architecture}.`, that only models with routed experts have."""


@dataclass(frozen=True, slots=True)
class MetadataField:
    """A config key, and the GGUF key after `{architecture}.` that holds its value.

    `kind`: int, float or bool. `least`: of an int. `aliases` are other spellings in config files. If a file lacks a
    field that is not `required`, it has the value `absent`; None means transformers' default. `none`: the number that
    files have where a config has None.
    """

    config: str
    key: str
    kind: type = int
    least: int = 1
    aliases: tuple[str, ...] = ()
    required: bool = True
    absent: float | bool | None = None
    none: int | None = None


@dataclass(frozen=True, slots=True)
class GemmaLayout:
    """What differs between files of Gemma, see loading/gguf/gemma.py. period: the last of so many layers sees all keys,
    the others a window. largest: number of layers of the model whose queries are scaled by hidden_size /
    num_attention_heads, all others by head_dim. local_rope: layers with a window have a rotary base of their own.
    capped: scores and logits have soft limits."""

    period: int
    largest: int
    local_rope: bool = False
    capped: bool = False


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """How GGUF files hold a family.

    Families may share an architecture: one with experts and one without, or one that scores experts by softmax and one
    by sigmoid.

    `modules`: modules of a layer that hold weights, with transformers' names. `tensors`: tensors of a layer whose names
    end neither in weight nor in bias. `implied`: config values that the architecture fixes. `by_tensor`: config values
    that are true if a file has that tensor. `rope`: rotary parameters that the architecture fixes. `names`: an
    architecture whose names of tensors the files have, if it is another. `loaded_as`: model_type of the family that
    reads such files, with its layout, because it computes the same; empty: this one. `also`: architectures whose files
    hold the text model of one with encoders, which is the same.

    `permuted`: the rows of q and k are in GGUF's rotary order. `rope_factors`: files may hold factors of the rotary
    frequencies. `rope_lists`: they may hold two lists, for short and for long sequences; the names of the rotary
    parameters with the scale of cosines and sines. `sigmoid`: experts are scored by sigmoid. `softmax_of_chosen`: files
    may say that experts are scored by the softmax over the chosen ones. `window_period`: the last of so many layers
    sees all keys, the others a window; 0: all see all. `stated`: metadata that never differs, and that llama.cpp needs.
    `bare_tensors`: names of `tensors` have no ending in files. `mlp_kinds`: the config lists the layers with experts,
    which files only have. `windows_listed`: files say which layers have one. `heads_listed`: they list the query heads
    of layers. `limits`: and the limits of gates (Step-3.5). `fused_attention`: query, key and value are written as one
    matrix, because llama.cpp reads no other. `two_parts`: the matrix that makes keys and values from latents is in two
    parts, see loading/gguf/latent.py. `shared_choices`: files say which layers have an indexer; the others share the
    choice of the layer before. `tiled`: linear attention has its value heads in turns, see loading/gguf/linear.py.
    `next_tokens`: files may have layers behind the model's own that predict further tokens. `yarn_scale`: files have
    mscale_all_dim of yarn, beside an mscale of 1. `gemma`: the family is a Gemma.
    """

    architecture: str
    fields: tuple[MetadataField, ...]
    modules: tuple[str, ...]
    _: KW_ONLY
    tensors: tuple[str, ...] = ()
    implied: Mapping[str, Any] = field(default_factory=dict)
    by_tensor: Mapping[str, str] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    names: str = ""
    loaded_as: str = ""
    also: tuple[str, ...] = ()
    permuted: bool = False
    rope_factors: bool = False
    rope_lists: tuple[str, ...] = ()
    sigmoid: bool = False
    softmax_of_chosen: bool = False
    stated: Mapping[str, Any] = field(default_factory=dict)
    bare_tensors: bool = False
    mlp_kinds: bool = False
    window_period: int = 0
    windows_listed: bool = False
    heads_listed: bool = False
    fused_attention: bool = False
    limits: bool = False
    two_parts: bool = False
    shared_choices: bool = False
    tiled: bool = False
    next_tokens: bool = False
    yarn_scale: bool = False
    gemma: GemmaLayout | None = None

    @property
    def has_experts(self) -> bool:
        """Whether its layers route tokens to experts."""
        return any(entry.key == EXPERT_KEY for entry in self.fields)


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    `name`: that people know. `model_type`, `class_name`: of its config and its causal language model in transformers.
    `gguf`: how GGUF files hold it; None: they do not.

    What the decoders cannot read from modules. `partly_rotated`: rotary embeddings may turn only the first columns of
    each head. `interleaved`: they turn pairs of adjacent columns, not columns half a head apart. `norm_after_rotary`:
    query and key are normalised after their rotation. `windows_rotated`: if the model has layers with sliding windows,
    only those rotate.

    A package's family also has these. `config`: a subclass of transformers.PretrainedConfig. `model`: a subclass of
    transformers.PreTrainedModel. It attends through transformers' attention interface, and its layers are
    `model.layers.N`. `decoded`: our decoders compute it; otherwise it runs by its own modules. None: they do if the
    classes are those of transformers.

    Only families of ktqueue have the rest. `latent`: its attention is multi-head latent attention, whose class is named
    like the model's. `linear`: some layers have linear attention. `indexed`: an indexer chooses the keys of a token.
    `indexer_interleaved`: the indexer's queries and keys are `interleaved`. `chunked`: some layers attend within
    chunks. `growing`: queries grow with their position. `group_score`: the score of a group of experts is the sum of
    its best so many, and the config's groups are checked; 0: they are not. `single_norms`: one norm of q, and one of k,
    spans all heads and hidden_size. `transposed_experts`: matrices of experts are transposed. `experts_in_turns`: and
    columns of gate and up are in turns. `quant_method`: a quantisation whose tensors belong to its own layout.
    `rotated_key`: the published config key of the number of rotated columns, which transformers does not read. `text`:
    it may be the text model of a folder that also holds encoders, because a position for each token is all that it
    needs. `heads_differ`: layers may differ in the number and the size of their key/value heads. `window_heads`: layers
    with a window have so many times the key/value heads that the config states. `queries_differ`: the config has query
    heads of layers. `normed_further`: a layer that predicts
    further tokens passes on the output of its last norm, not what goes into it. `aliases`: other model types of folders
    whose code computes the same for text, each with the fields that differ. `fixed`: config values that the code of
    such a type has, whatever config.json says.
    """

    name: str
    model_type: str
    class_name: str
    gguf: GgufLayout | None = None
    _: KW_ONLY
    partly_rotated: bool = False
    interleaved: bool = False
    norm_after_rotary: bool = False
    windows_rotated: bool = False
    config: type[Any] | None = None
    model: type[Any] | None = None
    decoded: bool | None = None
    latent: bool = False
    linear: bool = False
    indexed: bool = False
    indexer_interleaved: bool = False
    chunked: bool = False
    growing: bool = False
    group_score: int = 0
    single_norms: bool = False
    transposed_experts: bool = False
    experts_in_turns: bool = False
    quant_method: str = ""
    rotated_key: str = ""
    text: bool = False
    heads_differ: bool = False
    window_heads: int = 1
    queries_differ: bool = False
    normed_further: bool = False
    aliases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> GgufLayout:
        """How GGUF files hold it. Raises ValueError if they do not."""
        if self.gguf is None:
            raise ValueError(f"GGUF files do not hold {self.model_type}")
        return self.gguf

    @property
    def attention_class(self) -> str:
        """The class of its latent attention in transformers."""
        return f"{self.class_name.removesuffix('ForCausalLM')}Attention"


@dataclass(frozen=True, slots=True)
class UnsupportedFamily:
    """A family that is refused by name. `part`: what it has that is not computed. `model_types`: in config.json.
    `architectures`: of GGUF files, as llama.cpp names them."""

    name: str
    part: str
    model_types: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
