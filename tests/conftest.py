"""One thread per process for every test: results do not depend on the machine, and several processes share two cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
