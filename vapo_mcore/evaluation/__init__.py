"""Statistics, confidence intervals, records on disk and reports of evaluations, computed from graded responses."""
