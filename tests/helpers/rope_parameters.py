"""Rotary parameters of models that several tests make."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""The rotary parameters of Llama 3.1, for a context of 64 tokens."""
