"""``vapo-mcore watch``: show a running job in the terminal, from the files of its run directory. Imports no torch."""
