"""Which requests does somebody still keep? Found out without a look inside of who does."""

import weakref

from carpool.core.request import Request
from carpool.testing import Witness, make_request


class Name(str):
    """An id that can be watched: it lives as long as its request."""


class WatchedRequests:
    """Makes requests, and knows which of them are still in memory."""

    def __init__(self) -> None:
        self._names: list[weakref.ref[Name]] = []

    def make(self, *, now: float = 0.0) -> Request:
        name = Name(len(self._names))
        self._names.append(weakref.ref(name))
        return make_request(name, Witness(), now=now)

    def kept(self) -> int:
        return sum(name() is not None for name in self._names)
