"""Collects an importance matrix: sums of the squared inputs of each matrix over a text, as llama.cpp's llama-imatrix.

The model runs as transformers' own modules in float32, with attention inside whole chunks of the text. A matrix is
decoded when its module is called and dropped afterwards, so only one is in memory. All chunks of a batch pass it
together.
"""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.checkpoint import Checkpoint, Progress, decode_rows
from ktqueue.loading.gguf.families import family_of_model_type
from ktqueue.loading.gguf.importance import ColumnSums
from ktqueue.loading.gguf.library import ROUTERS, TensorNameMap
from ktqueue.loading.gguf.linear import column_order, file_parts
from ktqueue.loading.load import build_checked_skeleton, open_checkpoint
from ktqueue.loading.skeleton import build_original, compute_buffers
from ktqueue.loading.tokenizer.tokenizer import load_tokenizer
from ktqueue.operators import reference
from ktqueue.operators.experts import gate_facts
from ktqueue.operators.linear_attention import TILED
from ktqueue.operators.native import GateFacts
from ktqueue.operators.packed import ExpertWeights, PackedExperts

BATCH_TOKENS = 4096
_EMBEDDING = "model.embed_tokens.weight"


def calibrate(
    model: str, text: str, *, chunk_tokens: int = 512, chunks: int | None = None, progress: Progress | None = None
) -> tuple[dict[str, ColumnSums], int]:
    """Return the sums by GGUF name of the matrix, and how many chunks of `chunk_tokens` tokens were read.

    `model`: a folder or GGUF file. `chunks`: at most so many; None: all that are whole. A token that the tokenizer
    puts in front of a text replaces the first of each chunk. The output matrix is left out, as in llama-imatrix.
    Raises CheckpointError that names what cannot be calibrated.
    """
    checkpoint = open_checkpoint(model)
    values = checkpoint.config()
    family = family_of_model_type(str(values.get("model_type")), checkpoint.path)
    layout = family.layout
    if TILED in values:
        raise CheckpointError(
            f"{checkpoint.path}: GGUF files with linear attention cannot be calibrated; calibrate the model's folder"
        )
    batches = list(_batches(model, text, checkpoint, chunk_tokens, chunks))
    collector = _Collector(checkpoint)
    run = _prepared(checkpoint, collector, len(batches), progress)
    with torch.inference_mode():
        for batch in batches:
            run(batch)
    names = TensorNameMap(layout, int(values["num_hidden_layers"]))
    sums: dict[str, ColumnSums] = {}
    for name, found in collector.sums.items():
        if not np.isfinite(found.squares).all():
            raise CheckpointError(f"{checkpoint.path}: inputs of {name} are not finite", param="text")
        if layout.two_parts and name.endswith("kv_b_proj.weight"):
            continue  # its parts are multiplied by other numbers, which are not computed here
        parts = [name]
        if family.linear:
            parts = [part for part, _, _ in file_parts(layout, name, found.squares.shape, values)]
            order = column_order(layout, name, found.squares.shape[1], values)
            found.squares = found.squares[:, order]
        sums |= {stored: found for part in parts if (stored := names.find(part)) is not None}
    checkpoint.close()
    return sums, sum(map(len, batches))


def unused_experts(sums: dict[str, ColumnSums]) -> list[str]:
    """Return a line for each matrix of which some experts got no token: they have no importance."""
    return [
        f"{name}: {int((found.counts == 0).sum())} of {len(found.counts)} experts got no token"
        for name, found in sorted(sums.items())
        if (found.counts == 0).any()
    ]


def _batches(
    model: str, text: str, checkpoint: Checkpoint, chunk_tokens: int, chunks: int | None
) -> Iterator[torch.Tensor]:
    """Yield the chunks of a text, [chunks, tokens] int64. Raises CheckpointError if there is none."""
    longest = checkpoint.config().get("max_position_embeddings")
    if isinstance(longest, int) and chunk_tokens > longest:
        raise CheckpointError(f"{checkpoint.path}: the model has {longest} positions, a chunk {chunk_tokens} tokens")
    tokenizer = load_tokenizer(model)
    first, ids = tokenizer.encode(""), tokenizer.encode(text)
    count = min(len(ids) // chunk_tokens, len(ids) if chunks is None else chunks)
    if not count:
        raise CheckpointError(f"the text has {len(ids)} tokens, which is less than a chunk of {chunk_tokens}")
    if (highest := max(*first, *ids)) >= (rows := checkpoint.shape(_EMBEDDING)[0]):
        raise CheckpointError(
            f"{checkpoint.path}: token id {highest} of the text is outside the model's vocabulary of {rows}",
            param="text",
        )
    whole = torch.tensor(ids[: count * chunk_tokens]).reshape(count, chunk_tokens)
    if first:
        whole[:, 0] = first[0]
    size = max(1, BATCH_TOKENS // chunk_tokens)
    yield from (whole[start : start + size] for start in range(0, count, size))


class _Collector:
    """The sums by transformers name of the matrix. Those of experts are named `M.gate_proj.weight`, and so on."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.sums: dict[str, ColumnSums] = {}
        self._checkpoint = checkpoint

    def add(self, name: str, activations: torch.Tensor, expert: int = 0, experts: int = 1) -> None:
        """Add the inputs [..., columns] of a matrix, or of one of `experts` matrices."""
        rows = activations.reshape(-1, activations.shape[-1])
        self.sums.setdefault(name, ColumnSums.zeros(experts, rows.shape[1])).add(rows, expert)

    def experts(
        self, module: str, gate: GateFacts, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute an experts module of transformers, which has these arguments, expert by expert."""
        stored, out = self._checkpoint.experts(module), torch.zeros_like(hidden)
        for expert in range(len(stored.gate.data)):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            out[tokens] += self._expert(module, gate, stored, expert, hidden[tokens]) * weights[tokens, places][:, None]
        return out

    def weighted_experts(self, module: str, gate: GateFacts, rows: torch.Tensor) -> torch.Tensor:
        """Compute an experts module of Llama 4: [experts * tokens, hidden], zeros where a token did not choose."""
        stored = self._checkpoint.experts(module)
        inputs = rows.view(len(stored.gate.data), -1, rows.shape[1])
        out = torch.zeros_like(inputs)
        for expert, x in enumerate(inputs):
            tokens = x.any(1).nonzero()[:, 0]
            out[expert, tokens] = self._expert(module, gate, stored, expert, x[tokens])
        return out.view(rows.shape)

    def _expert(
        self, module: str, gate: GateFacts, stored: ExpertWeights, expert: int, x: torch.Tensor
    ) -> torch.Tensor:
        """Compute one expert for the rows x [tokens, hidden] and add its inputs."""
        count = len(stored.gate.data)
        self.add(f"{module}.gate_proj.weight", x, expert, count)
        self.sums[f"{module}.up_proj.weight"] = self.sums[f"{module}.gate_proj.weight"]  # of the same inputs
        if not len(x):
            self.add(f"{module}.down_proj.weight", x.new_zeros(0, stored.down.columns), expert, count)
            return x
        gated, up = (_product(x, stack, expert) for stack in (stored.gate, stored.up))
        inner = reference.activate(gate.activation, gated, up, gate.alpha, gate.limit)
        self.add(f"{module}.down_proj.weight", inner, expert, count)
        return _product(inner, stored.down, expert)


def _product(x: torch.Tensor, stack: PackedExperts, expert: int) -> torch.Tensor:
    matrix = torch.from_numpy(decode_rows(stack.data[expert], stack.quant, stack.columns))
    product = x @ matrix.T
    return product if stack.bias is None else product + torch.from_numpy(stack.bias[expert])


def _prepared(
    checkpoint: Checkpoint, collector: _Collector, batches: int, progress: Progress | None
) -> Callable[[torch.Tensor], None]:
    """Return a function that runs the model on token ids [chunks, tokens]."""
    config, _ = build_checked_skeleton(checkpoint, torch.float32)
    model: Any = build_original(config)
    experts, stored = set(checkpoint.expert_modules()), set(checkpoint.names())
    for name, module in model.named_modules():
        if name in experts:
            _compute_experts(name, module, collector, checkpoint)
        elif isinstance(module, nn.Linear | nn.Embedding):
            _decode_when_called(name, module, collector, checkpoint)
        elif f"{name}.weight".endswith(ROUTERS):
            _watch(name, module, collector)
        for leaf, parameter in module.named_parameters(recurse=False):
            of_matrix = leaf == "weight" and isinstance(module, nn.Linear | nn.Embedding)
            if name not in experts and not of_matrix:
                module._parameters[leaf] = _parameter(checkpoint, f"{name}.{leaf}", parameter)
        for leaf, buffer in module.named_buffers(recurse=False):
            if f"{name}.{leaf}" in stored:
                module._buffers[leaf] = _parameter(checkpoint, f"{name}.{leaf}", buffer).data
    compute_buffers(model, model, "cpu")
    base, layers = model.model, model.model.layers
    done = 0

    def count_layer(*_: Any) -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, batches * len(layers), "")

    for layer in layers:
        layer.register_forward_hook(count_layer)

    def run(ids: torch.Tensor) -> None:
        try:
            base(input_ids=ids, use_cache=False)
        except (RuntimeError, NotImplementedError) as error:  # such as a weight that a module reads without a call
            raise CheckpointError(f"{checkpoint.path}: the model cannot be calibrated: {error}") from error

    return run


def _parameter(checkpoint: Checkpoint, name: str, like: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(checkpoint.decode(name, torch.float32).reshape(like.shape), requires_grad=False)


def _decode_when_called(name: str, module: nn.Module, collector: _Collector, checkpoint: Checkpoint) -> None:
    dropped, stored = module._parameters["weight"], f"{name}.weight"
    assert dropped is not None
    if isinstance(module, nn.Embedding):  # some models ask for its device
        module._parameters["weight"] = dropped = _without_memory(dropped.shape)

    def before(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        module._parameters["weight"] = _parameter(checkpoint, stored, dropped)
        if isinstance(module, nn.Linear):
            collector.add(stored, inputs[0])

    def after(*_: Any) -> None:
        module._parameters["weight"] = dropped

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _without_memory(shape: torch.Size) -> nn.Parameter:
    return nn.Parameter(torch.tensor(torch.nan).expand(shape), requires_grad=False)


def _watch(name: str, module: nn.Module, collector: _Collector) -> None:
    module.register_forward_pre_hook(lambda _, inputs: collector.add(f"{name}.weight", inputs[0]))


def _compute_experts(name: str, module: Any, collector: _Collector, checkpoint: Checkpoint) -> None:
    arguments, gate = len(signature(module.forward).parameters), gate_facts(module)
    if gate is None or arguments not in (1, 3):
        raise CheckpointError(f"{checkpoint.path}: {name} cannot be calibrated: a {type(module).__name__} is not known")
    compute = collector.experts if arguments == 3 else collector.weighted_experts
    module.forward = partial(compute, name, gate)


def read_text(path: Path) -> str:
    """Read a text in UTF-8. Raises CheckpointError."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not a text in UTF-8: {error}") from error
