"""Loaded by every Python process of the tests on the real engine: puts the software verbs in place of the missing ones.

A library that is loaded already under its soname satisfies what the wheel links to and what it looks up itself.
"""

import ctypes
import os
from pathlib import Path

if "MORIIO_SOFTVERBS" in os.environ:
    for path in sorted(Path(os.environ["MORIIO_SOFTVERBS"]).glob("lib*.so*")):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
