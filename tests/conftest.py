"""Use one thread per process in all tests: results do not depend on the machine, and several processes share the cores."""

import os

import hypothesis

os.environ["OMP_NUM_THREADS"] = "1"
hypothesis.settings.register_profile("any_machine", deadline=None)  # the time of an example depends on the machine
hypothesis.settings.load_profile("any_machine")
