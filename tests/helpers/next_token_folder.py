"""Folders of tiny models with a layer that predicts the token after the next, and its twin in torch.

transformers has no such layer. The twin follows DeepSeek-V3 (arXiv 2412.19437, equations 21 to 23), with a layer of
transformers.
"""

import json
from pathlib import Path
from typing import Any

import torch
from decoder_families import make_model
from safetensors.torch import load_file, save_file

LAYERS = 3


class Twin:
    """A model of transformers, and the layer behind its own, whose further tensors are `extra`."""

    def __init__(self, model: Any, deeper: Any, extra: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.extra = extra
        self.deeper = deeper
        layer = deeper.model.layers[LAYERS]
        layer.self_attn.layer_idx = 0
        deeper.model.layers = torch.nn.ModuleList([layer])
        deeper.model.norm = torch.nn.Identity()
        deeper.config.num_hidden_layers = 1

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        found: torch.Tensor = x * scale * self.extra[name]
        return found

    def chain(self, tokens: list[int], count: int) -> list[int]:
        """The `count` likeliest drafts after `tokens`."""
        hidden = self.model.model(torch.tensor([tokens])).last_hidden_state[:, :-1]
        drafts: list[int] = []
        for _ in range(count):
            embedded = self.model.model.embed_tokens(torch.tensor([tokens[1:] + drafts]))
            parts = [self.normed(embedded, "enorm.weight"), self.normed(hidden, "hnorm.weight")]
            x = torch.nn.functional.linear(torch.cat(parts, -1), self.extra["eh_proj.weight"])
            last = self.deeper.model(inputs_embeds=x, use_cache=False).last_hidden_state[:, -1:]
            drafts.append(int(self.model.lm_head(self.normed(last, "shared_head.norm.weight"))[0, 0].argmax()))
            hidden = torch.cat([hidden, last], 1)
        return drafts


def save_folder(family: str, path: Path, *, is_right: bool = False) -> tuple[str, Twin]:
    """Save such a folder below `path`. Returns it and its twin.

    is_right: the next token depends on the last one alone, and the layer knows that, so all its drafts are right.
    """
    deeper = make_model(family, num_hidden_layers=LAYERS + 1)
    model = make_model(family, num_hidden_layers=LAYERS)
    hidden = model.config.hidden_size
    torch.manual_seed(5)
    extra = {name: torch.rand(hidden) + 0.5 for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    extra["eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.1
    if is_right:
        _make_right(deeper)
        extra = {name: torch.ones_like(tensor) for name, tensor in extra.items()}
        extra["eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    prefix = f"model.layers.{LAYERS}."
    model.load_state_dict({name: tensor for name, tensor in deeper.state_dict().items() if not name.startswith(prefix)})
    model.save_pretrained(path / "model")
    deeper.save_pretrained(path / "deeper")
    file = path / "model" / "model.safetensors"
    own, all_layers = load_file(file), load_file(path / "deeper" / "model.safetensors")
    further = {name: tensor for name, tensor in all_layers.items() if name.startswith(prefix)}
    save_file(own | further | {prefix + name: tensor for name, tensor in extra.items()}, file, {"format": "pt"})
    config = json.loads((path / "model" / "config.json").read_text())
    (path / "model" / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return str(path / "model"), Twin(model, deeper, extra)


def _make_right(model: Any) -> None:
    """Let layers add nothing, and each token be followed by another one."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                tensor.zero_()
        model.model.norm.weight.fill_(1.0)
        embeddings = model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.copy_(embeddings[torch.randperm(len(embeddings))])
