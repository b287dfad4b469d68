"""The command line."""

from carpool.cli.main import main

__all__ = ["main"]
