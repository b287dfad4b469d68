"""Carpool: a batching gateway for GPU inference, and batching for any Python function."""

from carpool.library import Batcher, batched
from carpool.version import __version__

__all__ = ["Batcher", "__version__", "batched"]
