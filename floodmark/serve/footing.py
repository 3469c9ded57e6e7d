"""How the threads of a daemon share one interpreter, set once before it serves: nobody is kept waiting by the feed.

Two things would: a collection of garbage that walks through all that imports have made, a tenth of a second each time;
and a thread that computes, which gives the interpreter away only every 5 ms, to others that need it ten times to give
one answer. Changes no result, only who waits for whom.
"""

from __future__ import annotations

import gc
import sys

SWITCH_S = 0.0005


def settle() -> None:
    """What is there now stays: collections do not look at it again. Threads take turns more often."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
