"""Batches whose input and output are in the store: checked, run by one owner at a time, merged, taken over."""
