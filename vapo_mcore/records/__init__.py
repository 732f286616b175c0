"""Write and display the records of a run: run directory, lock, metrics, trackers, console."""
