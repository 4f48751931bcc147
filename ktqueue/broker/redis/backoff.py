"""Waiting times between attempts."""

import random


def jittered(seconds: float) -> float:
    """A random time from half of `seconds` to all of it, so that clients of a lost server return at different times."""
    return seconds * random.uniform(0.5, 1.0)
