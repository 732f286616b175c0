"""``vapo-mcore doctor``: can this machine, or these nodes together, run a recipe?"""
