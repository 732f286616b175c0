"""What evaluations are made of once responses are graded: statistics with intervals, the records on disk, the report."""
