"""Operators of a GPU worker: each a kernel for CUDA tensors and a plain torch twin for all others."""
