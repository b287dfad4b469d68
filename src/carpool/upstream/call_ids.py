"""Ids of calls, for protocols whose answers repeat them. Pure: the salt is an argument.

1. An id is `carpool-SALT-NUMBER`. The salt is random and made once, so that no two gateways have an id in common.
2. An answer may bear the id of its call, or none: not every server repeats it.
3. An answer with another id of this form belongs to another call. An id of any other form was made up by the server, as
   many models of KServe do (`response_id=generate_uuid()`), and says nothing.
"""

from itertools import count

_START = "carpool-"


class CallIds:
    """Gives each call an id that no other has."""

    __slots__ = ("_numbers", "_start")

    def __init__(self, salt: str) -> None:
        self._start = f"{_START}{salt}-"
        self._numbers = count(1)

    def next(self) -> str:
        """The id of the next call."""
        return f"{self._start}{next(self._numbers)}"


def is_for_another_call(answered: object, sent: str) -> bool:
    """Whether an answer with the id `answered` cannot belong to the call that was sent with the id `sent`."""
    return isinstance(answered, str) and answered.startswith(_START) and answered != sent
