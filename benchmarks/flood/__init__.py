"""The hostile clients of `benchmarks.floods`, which run in a process of their own."""
