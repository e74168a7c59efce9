"""These tests run in a Python 3.10 of their own (see `tests/transport/mori/test_real_engine.py`), nowhere else."""

import os

collect_ignore_glob = [] if "MORIIO_SOFTVERBS" in os.environ else ["test_*.py"]
