"""Settings of a worker's engine."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from ktqueue.core.settings.setting import check_settings, setting

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheDtype = Literal["auto", "fp8"]
GenerationConfig = Literal["auto", "none"]
AutoOnOff = Literal["auto", "on", "off"]
Speculation = Literal["off", "lookup", "model", "mtp"]
BackendName = Literal["auto", "flashinfer", "triton", "torch"]
"""auto: FlashInfer if it is installed and supports the model's types, else our Triton kernels; torch on a CPU."""
HandoffMethod = Literal["auto", "flags", "host_functions", "direct"]
"""How routed tokens reach the CPU's experts; "direct" is for tensors on the CPU."""

LEAST_AUTO_ROWS = 32  # that `max_num_seqs` auto takes even if memory is short
_flag, _gpu_flag = partial(setting, panel="Engine"), partial(setting, panel="GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One worker's engine. None: chosen from the model and the machine."""

    model: str = _flag(
        "demo",
        "A .gguf file, a Hugging Face folder, hf:OWNER/NAME[:QUANT], or demo (built in).",
        details="Of a split file, name any part. `hf:` names are downloaded: see [serving](../guides/serving.md).",
        flags=("--model", "-m"),
        metavar="MODEL",
    )
    served_model_name: tuple[str, ...] = _flag(
        (),
        "Names that clients ask for: answers have the first, the others are aliases.",
        details="Repeat the flag, or separate names by commas. By default it is the name of the file or folder; for "
        "`hf:OWNER/NAME:QUANT` it is `NAME:QUANT`.",
        metavar="NAME",
    )
    generation_config: GenerationConfig = _flag(
        "auto",
        "Sampling defaults of the model: auto (as its files say) or none.",
        details="auto reads temperature, top_k, top_p, min_p and repetition_penalty from the folder's "
        "`generation_config.json`, or from `general.sampling.*` of a GGUF file. A request's own values come first.",
    )
    tool_call_parser: str = _flag(
        "auto",
        "Format of the model's tool calls: auto (as its chat template shows), none, or a name.",
        details="Names are those of `ktqueue/answers/families.py`, such as `tool_call` (Hermes, Qwen) or `llama3`; "
        "names of vLLM and SGLang are understood too.",
        metavar="NAME",
    )
    reasoning_parser: str = _flag(
        "auto",
        "Format of the model's reasoning: auto (as its chat template shows), none, or a name.",
        details="Names: `think`, `kimi`, `mistral`, `seed`, `command`, `harmony`. Those of vLLM and SGLang work too.",
        metavar="NAME",
    )
    force_think: bool = _flag(
        False,
        "Begin the answer of every chat inside the model's reasoning.",
        details="A request's `force_think` comes first.",
    )
    rules: str | None = _flag(
        None,
        "Rules that replace modules: a YAML file, or a shipped one by name.",
        details="Shipped are `default`, `exact`, `quantised`, `both` and `modules`: see [rules](../guides/rules.md).",
        shown="default",
        metavar="NAME|FILE",
    )
    tokenizer: str | None = _flag(
        None,
        "Folder of another tokenizer. Requests with tokens that the model does not have are refused.",
        shown="the model's",
        metavar="DIR",
    )
    device: str = _flag(
        "cpu",
        "cpu or cuda.",
        details="Modules that no rule places are on this device. A process uses one GPU, which `CUDA_VISIBLE_DEVICES` "
        "selects. Other devices (`xpu`, `npu`, `rocm`, `mps`) are refused by name.",
    )
    dtype: Dtype = _flag(
        "auto", "auto, float32, bfloat16 or float16.", details="auto is float32 on a CPU and bfloat16 on a GPU."
    )
    threads: int | None = _flag(
        None,
        "CPU threads of the kernels.",
        details="torch has one of them, for the little work that is left to it.",
        shown="the physical cores allowed, on a GPU one less",
        at_least=1,
        at_most=1024,
        metavar="N",
    )
    pin_threads: AutoOnOff = _flag(
        "auto",
        "Keep CPU threads on their cores: auto, on or off.",
        details="Pinned threads are divided evenly among NUMA nodes. auto pins at least 4 threads that use more than "
        "half of the allowed cores, if no CPU quota is below their number.",
    )
    batch_invariant: bool | None = _flag(
        None,
        "Compute a token alike in every batch; without it AMX reads prompts faster.",
        details="A job that another worker continues then has the same text. It matters only on CPUs with AMX, which "
        "read long prompts up to twice as fast without it.",
        shown="true on a CPU, false on a GPU",
        flags=("--batch-invariant/--no-batch-invariant",),
    )
    max_model_len: int | None = _flag(
        None, "Context in tokens, prompt and completion together.", shown="the model's", at_least=16, metavar="N"
    )
    max_num_seqs: int | None = _flag(
        None,
        "Sequences that run at once: a number, or auto.",
        details="auto takes as many as memory, `max_num_batched_tokens` and 2,112 allow. Of these, batch jobs fill as "
        "many as raise the tokens computed in a second, by measurement.",
        shown="auto",
        none_word="auto",
        at_least=1,
        metavar="N|auto",
    )
    max_num_batched_tokens: int | None = _flag(
        None,
        "Tokens of one step, prefill and decode together.",
        shown="512, on a GPU 8192",
        at_least=1,
        at_most=1 << 17,
        metavar="N",
    )
    page_size: int = _flag(16, "Tokens of a cache page.", at_least=1, at_most=4096, metavar="N")
    kv_cache_bytes: int | None = _flag(
        None,
        "Size of the cache.",
        details="On a CPU the default is 4,096 tokens for each row, or the whole context if that is shorter, and at "
        "most `host_memory_utilization` of the memory that is free after loading. On a GPU it is what "
        "`gpu_memory_utilization` leaves.",
        shown="from the free memory; all that is left of a GPU",
        metavar="SIZE",
    )
    num_pages: int | None = setting(
        None, "Size of the cache in pages, instead of bytes.", shown="from `kv_cache_bytes`", at_least=1
    )
    kv_cache_dtype: CacheDtype = _flag(
        "auto",
        "Type of the cache on a GPU: auto (as computed) or fp8.",
        details="`fp8` is float8_e4m3fn with scales for each layer, half the bytes of bfloat16.",
    )
    enable_prefix_caching: bool = _flag(
        True, "Reuse the pages of equal prefixes.", flags=("--enable-prefix-caching/--no-enable-prefix-caching",)
    )
    speculation: Speculation = _flag(
        "off",
        "Verify several tokens of a sequence in one step: off, lookup, model, or mtp.",
        details="lookup drafts what followed the last tokens when they occurred in the sequence before, and model what "
        "`draft_model` would answer. mtp drafts with a layer of the model that predicts further tokens, as of "
        "DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5. The answers stay the same: see "
        "[serving](../guides/serving.md#drafts).",
    )
    draft_model: str | None = _flag(
        None,
        "A small model with the same vocabulary, for `speculation` model: a file, a folder or a name as of `model`.",
        shown="none",
        metavar="MODEL",
    )
    max_draft_tokens: int = _flag(
        8,
        "Most tokens that are drafted for a sequence in a step.",
        details="Only as many are drafted as raise the tokens computed in a second, by measurement.",
        at_least=1,
        metavar="N",
    )
    batch_share: int = setting(
        8, "One of so many rows is never taken from running batch jobs for interactive ones.", at_least=1
    )
    interactive_step_ms: float | None = _flag(
        None,
        "Longest step, in milliseconds, while interactive jobs run or have just run: a number, or auto.",
        details="Batch jobs share the steps of interactive jobs up to this length, except the small steps of "
        "`interactive_share`. auto is twice the step of a short prompt by measurement, from 200 to 400. "
        "With 0 steps have any length, and batch jobs take part in every step.",
        shown="auto",
        none_word="auto",
        at_least=0,
        metavar="MS|auto",
    )
    interactive_share: float = _flag(
        0.05,
        "Part of the time for small steps of interactive jobs, while batch jobs run too.",
        details="More makes the tokens of interactive jobs come faster, and takes throughput from batch jobs. "
        "Where steps overlap on a GPU, batch jobs lose at most this part of their time by it, or 0.3 if that is more. "
        "With 0 all steps are shared, also there.",
        at_least=0,
        at_most=0.9,
        metavar="PART",
    )
    host_memory_utilization: float = _flag(
        0.5,
        "Share of the host's free memory that the cache may take.",
        details="It applies on a CPU, within the limits of control groups, to a cache without a given size. "
        "`ktqueue up --workers N` divides it by N. The memory is taken as the cache fills.",
        above=0,
        at_most=1,
        metavar="PART",
    )
    gpu_memory_utilization: float = _gpu_flag(
        0.9,
        "Share of the GPU's memory to fill.",
        details="Weights, experts, workspaces, graphs, and pages with the rest.",
        above=0,
        at_most=1,
        metavar="PART",
    )
    gpu_expert_memory_bytes: int = _gpu_flag(
        0, "GPU memory for the most used experts.", flags=("--gpu-expert-memory",), metavar="SIZE"
    )
    expert_uses_dir: str | None = setting(
        None,
        "Folder of files that say how often experts of each model were used, or off.",
        details="A worker on a GPU adds its uses every ten minutes. The next one has the experts that were used most "
        "in GPU memory, and copies them first for long prompts. Workers may share the folder.",
        shown="`ktqueue/experts` in `$XDG_CACHE_HOME` or `~/.cache`",
    )
    routing_file: str | None = _flag(
        None,
        "Write which experts each generated token chose to this .npz file, when the process ends.",
        details="The file is a routing trace, as `synthetic:SHAPE:QUANT:routing=FILE` reads it: up to 512 parts of "
        "sequences, of 128 tokens each. A file that exists gets more of them.",
        shown="off",
        flags=("--record-routing",),
        metavar="FILE",
    )
    attention_backend: BackendName = _gpu_flag(
        "auto",
        "auto, flashinfer, triton or torch.",
        details="Attention on a GPU; auto takes the first that is installed.",
    )
    cuda_graphs: bool = _gpu_flag(
        True,
        "Capture decode steps and short prompts at start, and replay them as CUDA graphs.",
        flags=("--cuda-graphs/--no-cuda-graphs",),
    )
    handoff: HandoffMethod = _gpu_flag(
        "auto",
        "How tokens reach the CPU's experts: auto, flags or host_functions.",
        details="`flags` are stream memory operations.",
    )
    expert_streaming: AutoOnOff = _gpu_flag(
        "auto", "Copy experts to the GPU for a step: auto, on or off.", details="auto copies them if that is faster."
    )
    expert_prefetch: bool = _gpu_flag(
        True,
        "Let the CPU prefetch experts of the next layer while the GPU works.",
        details="Results are the same.",
        flags=("--expert-prefetch/--no-expert-prefetch",),
    )

    def __post_init__(self) -> None:
        """Raises ConfigError naming the key."""
        check_settings("engine", self)

    @property
    def rows(self) -> int:
        """Sequences that run at once, or LEAST_AUTO_ROWS where that is auto and nothing was measured."""
        return self.max_num_seqs or min(LEAST_AUTO_ROWS, self.step_tokens)

    @property
    def interactive_step_seconds(self) -> float | None:
        """`interactive_step_ms` in seconds, or None if it is auto."""
        return None if self.interactive_step_ms is None else self.interactive_step_ms / 1000

    def batch_floor(self, rows: int) -> int:
        """How many of `rows` rows are never taken from batch jobs."""
        return -(-rows // self.batch_share)

    @property
    def on_gpu(self) -> bool:
        """Whether the engine runs on a GPU."""
        return self.device.partition(":")[0] == "cuda"

    @property
    def drafts(self) -> bool:
        """Whether steps may verify drafts."""
        return self.speculation != "off"

    @property
    def step_tokens(self) -> int:
        """Most tokens of one step. On a GPU experts are streamed once a step, so steps are longer there."""
        return self.max_num_batched_tokens or (8192 if self.on_gpu else 512)
