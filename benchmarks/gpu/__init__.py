"""The engine of a GPU worker."""
