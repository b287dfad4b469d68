"""Inputs of a batch that are the same are sent once; an API that takes a fixed number gets that many. Pure.

For models whose results are kept. A gateway has coalesced its own requests already; here those of several gateways
meet, and tasks. Leases, attempts and searches are about requests as before: only what is written in a call, and what
comes back, is fewer.
"""

from typing import Any, NamedTuple

from carpool.core.request import DONE, Request


class Merged(NamedTuple):
    """The members of a call."""

    # One request for each input, in the order of the first; and for each member the place of its input there: None
    # where there is one input for each member.
    sent: list[Request]
    places: list[int] | None


def merge_same(members: list[Request], *, is_owned: bool) -> Merged:
    """One request for each input; with `is_owned`, for each input of each owner."""
    if len({request.input for request in members}) == len(members):  # so it is with most
        return Merged(members, None)
    places_of: dict[Any, int] = {}
    sent: list[Request] = []
    places: list[int] = []
    for request in members:
        key = (request.owner, request.input) if is_owned else request.input
        place = places_of.setdefault(key, len(sent))
        if place == len(sent):
            sent.append(request)
        places.append(place)
    return Merged(sent, places)


def fill_up(merged: Merged, count: int) -> Merged:
    """As many inputs as the API wants: the smallest one again and again, whose further outputs nobody gets."""
    sent, places = merged
    if len(sent) >= count:
        return merged
    smallest = min(sent, key=lambda request: request.size)
    return Merged([*sent, *[smallest] * (count - len(sent))], places or list(range(len(sent))))


def still_there(merged: Merged, members: list[Request]) -> list[Request]:
    """For each input a request that has not ended, if there is one: the output is written in the form that it wants."""
    if merged.places is None:
        return merged.sent
    found = list(merged.sent)
    for request, place in zip(members, merged.places, strict=True):
        if found[place].phase == DONE:
            found[place] = request
    return found
