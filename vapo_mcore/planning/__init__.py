"""What a run needs before it is started: memory of every rank by stage, bytes moved, time and GPU-hours (``vapo-mcore plan``)."""
