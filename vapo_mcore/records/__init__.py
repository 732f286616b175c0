"""What a run writes and shows: run directory, lock, metrics, trackers, console."""
