"""The causal language models of transformers by model type, with those that it lists only as parts of others."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS

__all__ = ["CAUSAL_MODELS"]

CAUSAL_MODELS.setdefault("mistral4", "Mistral4ForCausalLM")  # of mistral3; AutoModelForCausalLM reads the same table
