"""Python's garbage collector, paused while many objects are made that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no garbage inside.

    Declared tensors and their plan are hundreds of thousands of objects. Every few hundred new ones start a collection,
    which walks over those of the whole process in vain (an engine of SGLang has a million) and takes longer than making
    them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
