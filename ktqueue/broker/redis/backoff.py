"""How long to wait before the next try."""

import random


def jittered(seconds: float) -> float:
    """Between half of it and all of it, so that those who lost the same server do not come back as one."""
    return seconds * random.uniform(0.5, 1.0)
