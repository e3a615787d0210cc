"""Being here puts this folder on the import path, so that tests of several packages share helpers."""

import os

from hypothesis import settings

# One thread: the models are tiny, and OpenMP threads that wait for each other on a busy machine are slow.
# What must be right on several threads says so itself (tests/kernels).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: shared machines are slow at times, and no test here is about time. The same examples in every
# run: a failure that comes and goes is found by raising max_examples, not by running again.
settings.register_profile("loraplex", deadline=None, derandomize=True)
settings.load_profile("loraplex")
