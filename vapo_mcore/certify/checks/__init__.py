"""The checks, one module each. A module has ``run(bench)``, which returns its measurements."""
