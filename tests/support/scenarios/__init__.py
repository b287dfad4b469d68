"""Rows of FAULTS.md that `tests/integration` runs short and `tests/chaos` long, or that several tests there share."""
