"""The rows of FAULTS.md, one module for each kind, in a size that the caller chooses: `tests/integration` runs them
short and with every `make test`, `tests/chaos` long.
"""
