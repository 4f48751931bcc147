"""Profiles: what each step, token and request took, written beside the work and read by `ktqueue profile`."""
