"""The engine: carries out what the scheduler decides, and turns text into tokens and back."""

import os

# A thread of a parallel region that is done first spins until the others are. By default it does so for
# milliseconds, and on a core that it has to share it takes from the others the time that it waits for: a step
# then takes ten times as long. Read when torch loads its OpenMP library, so set before.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
