"""Carpool: a batching gateway for GPU inference, and batching for any Python function."""

from typing import TYPE_CHECKING, Any

from carpool.version import __version__

if TYPE_CHECKING:
    from carpool.library import Batcher, batched

__all__ = ["Batcher", "__version__", "batched"]


def __getattr__(name: str) -> Any:
    """Import the library when it is asked for: the command line starts faster without it."""
    if name in ("Batcher", "batched"):
        from carpool import library

        return getattr(library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
