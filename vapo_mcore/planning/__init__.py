"""Estimate a run before it is started: memory of every rank by stage, communication, time and GPU-hours (``vapo-mcore plan``)."""
