"""Hugging Face folders and the hub: configs, safetensors, downloads."""
