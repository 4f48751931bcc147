"""Folders of tiny models with a layer that predicts the token after the next, and its twin in torch.

transformers has no such layer. The twin follows DeepSeek-V3 (arXiv 2412.19437, equations 21 to 23), with a layer of
transformers. In Qwen3-Next and Qwen3.5 norms multiply by 1 + weight, and further drafts follow from the output of the
last one.
"""

import json
from pathlib import Path
from typing import Any

import torch
from decoder_families import make_model
from safetensors.torch import load_file, save_file

LAYERS = 3
QWEN = "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"
"""Families and model types."""
OF_QWEN = {
    f"model.layers.{LAYERS}.{name}.weight": f"mtp.{qwen}.weight"
    for name, qwen in {
        "eh_proj": "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "shared_head.norm": "norm",
    }.items()
}
"""Names that Qwen3-Next gives to what DeepSeek-V3 has beside the tensors of a layer."""


class Twin:
    """A model of transformers, and the layer behind its own, whose further tensors are `extra`."""

    def __init__(self, model: Any, deeper: Any, extra: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.extra = extra
        self.is_qwen = model.config.model_type in QWEN
        self.prefixes = ("mtp.layers.0.", "mtp.") if self.is_qwen else (f"model.layers.{LAYERS}.",)
        """Of names of the layer's tensors in the file, first of those that other layers have too."""
        self.deeper = deeper
        layer = deeper.model.layers[LAYERS]
        layer.self_attn.layer_idx = 0
        deeper.model.layers = torch.nn.ModuleList([layer])
        deeper.model.norm = torch.nn.Identity()
        deeper.config.num_hidden_layers = 1
        self._chains: dict[tuple[int, ...], list[int]] = {}

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        found: torch.Tensor = x * scale * (self.extra[name] + int(self.is_qwen))
        return found

    def chain(self, tokens: list[int], count: int) -> list[int]:
        """The `count` likeliest drafts after `tokens`, computed once: engines of several kinds ask for the same."""
        known = self._chains.get(tuple(tokens), [])
        if len(known) < count:
            known = self._chains[tuple(tokens)] = self._compute_chain(tokens, count)
        return known[:count]

    @torch.no_grad()
    def _compute_chain(self, tokens: list[int], count: int) -> list[int]:
        hidden = self.model.model(torch.tensor([tokens])).last_hidden_state[:, :-1]
        drafts: list[int] = []
        for _ in range(count):
            embedded = self.model.model.embed_tokens(torch.tensor([tokens[1:] + drafts]))
            parts = [self.normed(embedded, "enorm.weight"), self.normed(hidden, "hnorm.weight")]
            x = torch.nn.functional.linear(torch.cat(parts, -1), self.extra["eh_proj.weight"])
            last = self.deeper.model(inputs_embeds=x, use_cache=False).last_hidden_state[:, -1:]
            normed = self.normed(last, "shared_head.norm.weight")
            drafts.append(int(self.model.lm_head(normed)[0, 0].argmax()))
            hidden = torch.cat([hidden, normed if self.is_qwen else last], 1)
        return drafts


def save_folder(family: str, path: Path, *, is_right: bool = False) -> tuple[str, Twin]:
    """Save such a folder below `path`. Returns it and its twin.

    is_right: the next token depends on the last one alone, and the layer knows that, so all its drafts are right.
    """
    is_qwen = family in QWEN
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    deeper, model = (
        make_model(family, num_hidden_layers=count, **({"layer_types": kinds[:count]} if is_qwen else {}))
        for count in (LAYERS + 1, LAYERS)
    )
    hidden = model.config.hidden_size
    torch.manual_seed(5)
    extra = {name: torch.rand(hidden) + 0.5 for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    extra["eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.1
    if is_right:
        _make_right(deeper)
        extra = {name: torch.ones_like(tensor) - int(is_qwen) for name, tensor in extra.items()}
        extra["eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    prefix = f"model.layers.{LAYERS}."
    model.load_state_dict({name: tensor for name, tensor in deeper.state_dict().items() if not name.startswith(prefix)})
    model.save_pretrained(path / "model")
    deeper.save_pretrained(path / "deeper")
    file = path / "model" / "model.safetensors"
    own, all_layers = load_file(file), load_file(path / "deeper" / "model.safetensors")
    further = {name: tensor for name, tensor in all_layers.items() if name.startswith(prefix)}
    further |= {prefix + name: tensor for name, tensor in extra.items()}
    config = json.loads((path / "model" / "config.json").read_text())
    if is_qwen:
        further = {OF_QWEN.get(name, name).replace(prefix, "mtp.layers.0."): one for name, one in further.items()}
    else:
        config["num_nextn_predict_layers"] = 1
    save_file(own | further, file, {"format": "pt"})
    (path / "model" / "config.json").write_text(json.dumps(config))
    return str(path / "model"), Twin(model, deeper, extra)


def _make_right(model: Any) -> None:
    """Let layers add nothing, and each token be followed by another one."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                tensor.zero_()
        model.model.norm.weight.fill_(0.0 if model.config.model_type in QWEN else 1.0)
        embeddings = model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.copy_(embeddings[torch.randperm(len(embeddings))])
