"""GGUF files: reading, writing, and what their metadata and tensor names mean."""
