"""The garbage collector of our processes."""

import atexit
import gc

SELDOM = 50_000  # new objects between two collections while a process starts: a worker imports a million
THRESHOLD = 20_000  # the same while it serves; objects of a token are in no cycles


def collect_seldom() -> None:
    """Collect seldom from now on, and not at the exit. Call it before the other imports of a program.

    What modules consist of is hardly ever garbage, and the kernel frees all at once. Looking at it again and again
    takes a third of a short command, and 1.5 seconds of one that imports torch.
    """
    gc.set_threshold(SELDOM)
    atexit.register(gc.freeze)


def settle() -> None:
    """Collect garbage once, and never look at the objects of now again. For the moment before a process serves.

    A model's files, graphs and modules are a million objects, and walking over them stops a worker for 0.3 seconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
