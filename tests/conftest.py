"""One thread per process for every test: results do not depend on the machine, and several processes share two cores."""

import os

import hypothesis

os.environ["OMP_NUM_THREADS"] = "1"
hypothesis.settings.register_profile("any_machine", deadline=None)  # how long an example takes says more about the machine
hypothesis.settings.load_profile("any_machine")
