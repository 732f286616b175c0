"""``vapo-mcore watch``: a running job in the terminal, from the files of its run directory. No torch here."""
