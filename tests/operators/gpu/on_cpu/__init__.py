"""Kernels in CUDA C++ on a CPU."""
