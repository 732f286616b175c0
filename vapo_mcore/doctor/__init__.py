"""``vapo-mcore doctor``: check whether this machine, or a group of nodes, can run a recipe."""
