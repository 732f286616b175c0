"""A user's module whose import fails."""

raise RuntimeError("this module is broken")
