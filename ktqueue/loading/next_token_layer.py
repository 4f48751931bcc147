"""Loads the layer of a folder that predicts the token after the next, for a model that is loaded already."""

from pathlib import Path

from ktqueue.core.errors import CheckpointError
from ktqueue.loading.huggingface.checkpoint import open_folder
from ktqueue.loading.huggingface.next_tokens import layer_count
from ktqueue.loading.load import LoadedModel
from ktqueue.loading.materialize import CheckpointWeights
from ktqueue.operators.decoder import CpuDecoder
from ktqueue.operators.next_token_layer import NextTokenLayer


def load_next_token_layer(model: LoadedModel, path: Path) -> NextTokenLayer:
    """Load the first such layer of the folder `path`. Raises CheckpointError if there is none, or a part is missing."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: layers that predict further tokens are read from a Hugging Face folder only")
    decoder = model.module
    if not isinstance(decoder, CpuDecoder):
        raise CheckpointError(f"{path}: only CpuDecoder has layers that predict further tokens")
    checkpoint = open_folder(path, next_tokens=True)
    try:
        if not layer_count({"num_hidden_layers": model.config.num_hidden_layers}, checkpoint.names()):
            raise CheckpointError(f"{path} has no layer that predicts further tokens")
        try:
            return decoder.load_next_token_layer(CheckpointWeights(checkpoint, "", {}, lambda *_: None))
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: the layer that predicts further tokens: {error}") from error
    finally:
        checkpoint.close()
