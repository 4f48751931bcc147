"""Passing activations from the GPU to the CPU's expert threads, and the result back."""
