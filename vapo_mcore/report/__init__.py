"""``vapo-mcore report``: one HTML page of one or several runs, from their files. Needs neither torch nor a network."""
