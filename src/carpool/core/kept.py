"""Results that are kept for the next caller that needs the same: bounded by number and by bytes. Pure."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

# The bytes that one `Kept` may hold.
KEPT_BYTES_MAX = 4 * 1024 * 1024


class Kept(dict[Key, Value]):
    """Results by what they were worked out from. When there is no room for one more, all are forgotten.

    Few of them make most of the traffic: they are back soon. `get` and `in` are the dictionary's own, so a result that
    is found costs nothing more; only `keep` may add one.
    """

    __slots__ = ("_bytes", "_bytes_max", "_number_max")

    def __init__(self, number_max: int, bytes_max: int = KEPT_BYTES_MAX) -> None:
        super().__init__()
        self._number_max = number_max
        self._bytes_max = bytes_max
        self._bytes = 0

    def keep(self, key: Key, value: Value, size: int) -> None:
        """Keep a result; both of them have so many bytes together."""
        if size > self._bytes_max:
            return
        if len(self) >= self._number_max or self._bytes + size > self._bytes_max:
            self.clear()
        self[key] = value
        self._bytes += size

    def clear(self) -> None:
        """Forget all of them."""
        super().clear()
        self._bytes = 0
