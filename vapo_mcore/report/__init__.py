"""``vapo-mcore report``: write a self-contained HTML report of one or several runs from their files. Needs neither torch nor a network."""
