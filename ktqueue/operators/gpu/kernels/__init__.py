"""Triton kernels, their plain torch twins, and the layout of packed weights."""
