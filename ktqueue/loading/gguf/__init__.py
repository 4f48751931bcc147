"""GGUF files: reading and writing them, and the meaning of their metadata and tensor names."""
