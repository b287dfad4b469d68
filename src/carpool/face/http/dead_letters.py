"""The operators' routes for dead letters: list, show, replay, drop. Inputs are shown one at a time, and only here."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from carpool.core.clock import rfc3339
from carpool.core.dead_letter import DeadLetterSummary, dead_letter_causes
from carpool.core.errors import CarpoolError, InternalError, Malformed, NotFound
from carpool.core.ports import DeadLetterDesk
from carpool.core.snapshot import Moment, Page
from carpool.core.tensors import as_input
from carpool.face.http.exchange import Exchange
from carpool.face.http.problem import respond_problem
from carpool.face.http.router import Route, Router, query_of

logger = logging.getLogger("carpool")

LETTERS_LISTED = 100
LETTERS_LISTED_MAX = 1000
# What every JSON reader takes for a whole number.
LETTER_ID_MAX = 2**53 - 1

# Status and body of an answer.
StatusAndBody = tuple[int, bytes]


class LetterListed(Page, frozen=True):
    """A dead letter without its input."""

    id: int
    request_id: str
    model: str
    cause: Annotated[
        str,
        Meta(
            description="the code of an error; unknown: another version of Carpool wrote this letter",
            extra_json_schema={"enum": [*dead_letter_causes(), "unknown"]},
        ),
    ]
    detail: Annotated[str, Meta(description="what its client was told")]
    sends: Annotated[int, Meta(description="how often it was sent to an endpoint")]
    buried_at: Moment
    size: Annotated[int, Meta(description="bytes of input and parameters")]


class LetterShown(LetterListed, frozen=True):
    """A dead letter with its input."""

    owner: Annotated[str, Meta(description="whom it counts for: the client's address; empty if that is not known")]
    input: Raw
    parameters: Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})]


class LettersListed(Page, frozen=True):
    """Some dead letters, and how many there are."""

    dead_letters: list[LetterListed]
    total: int


class LettersDropped(Page, frozen=True):
    """How many there were."""

    dropped: int


class DeadLetterRoutes:
    """Serves dead letters on the admin port."""

    def __init__(self, desk: DeadLetterDesk) -> None:
        self._desk = desk
        self._causes = frozenset(dead_letter_causes())

    def add_to(self, router: Router) -> None:
        """Serve the paths of dead letters."""
        router.add(b"GET", b"/internal/dead-letters", awaited(self.page))
        router.add(b"DELETE", b"/internal/dead-letters", awaited(self.drop_all))
        router.add(b"POST", b"/internal/dead-letters/replay", awaited(self.replay_all))
        router.add(b"GET", b"/internal/dead-letters/", awaited(self.show))
        router.add(b"DELETE", b"/internal/dead-letters/", awaited(self.drop))
        router.add(b"POST", b"/internal/dead-letters/*/replay", awaited(self.replay))

    async def page(self, exchange: Exchange, _: str) -> StatusAndBody:
        """`GET /internal/dead-letters`: some of them, without their inputs."""
        query = query_of(exchange)
        limit = whole_number(query.get("limit", str(LETTERS_LISTED)), "limit", 1, LETTERS_LISTED_MAX)
        after = whole_number(query.get("after", "0"), "after", 0, LETTER_ID_MAX)
        letters = [LetterListed(**summary_of(letter)) for letter in await self._desk.page(after, limit)]
        return 200, msgspec.json.encode(LettersListed(letters, self._desk.total()))

    async def show(self, exchange: Exchange, letter_id: str) -> StatusAndBody:
        """`GET /internal/dead-letters/{id}`: one, with its input."""
        letter = await self._desk.show(known_form(letter_id))
        value, parameters = msgspec.Raw(as_input(letter.input)), msgspec.Raw(letter.parameters or b"null")
        shown = LetterShown(**summary_of(letter.summary), owner=letter.owner, input=value, parameters=parameters)
        return 200, msgspec.json.encode(shown)

    async def replay(self, exchange: Exchange, letter_id: str) -> StatusAndBody:
        """`POST /internal/dead-letters/{id}/replay`: make one a task again."""
        return 202, msgspec.json.encode(await self._desk.replay(known_form(letter_id)))

    async def replay_all(self, exchange: Exchange, _: str) -> StatusAndBody:
        """`POST /internal/dead-letters/replay`: make all, or those of one cause, tasks again."""
        cause = query_of(exchange).get("cause")
        if cause is not None and cause not in self._causes:
            raise Malformed(f"`cause` must be one of {', '.join(sorted(self._causes))}")
        return 202, msgspec.json.encode(await self._desk.replay_all(cause))

    async def drop(self, exchange: Exchange, letter_id: str) -> StatusAndBody:
        """`DELETE /internal/dead-letters/{id}`."""
        await self._desk.drop(known_form(letter_id))
        return 204, b""

    async def drop_all(self, exchange: Exchange, _: str) -> StatusAndBody:
        """`DELETE /internal/dead-letters?all=true`."""
        if query_of(exchange).get("all") != "true":
            raise Malformed("this drops every dead letter; say so with `?all=true`, or name one by its id")
        return 200, msgspec.json.encode(LettersDropped(await self._desk.drop_all()))


def awaited(work: Callable[[Exchange, str], Awaitable[StatusAndBody]]) -> Route:
    """A route that runs in a task of its own."""
    # The event loop holds its tasks only weakly.
    running: set[asyncio.Task[None]] = set()

    def route(exchange: Exchange, rest: str) -> None:
        task = asyncio.get_running_loop().create_task(_serve(work(exchange, rest), exchange))
        running.add(task)
        task.add_done_callback(running.discard)

    return route


async def _serve(work: Awaitable[StatusAndBody], exchange: Exchange) -> None:
    try:
        status, body = await work
    except CarpoolError as error:
        respond_problem(exchange, error)
    except Exception:
        logger.exception("an operator's request failed")
        respond_problem(exchange, InternalError("the gateway failed on this request"))
    else:
        exchange.respond(status, body)


def summary_of(letter: DeadLetterSummary) -> dict[str, Any]:
    """The fields of a dead letter that a list shows."""
    shown = msgspec.structs.asdict(letter)
    shown["buried_at"] = rfc3339(shown.pop("buried_wall"))
    return shown


def known_form(letter_id: str) -> int:
    """The number of a dead letter; raises NotFound for text that cannot be one."""
    try:
        return whole_number(letter_id, "id", 1, LETTER_ID_MAX)
    except Malformed:
        raise NotFound("there is no such dead letter; an id is a whole number") from None


def whole_number(text: str, name: str, least: int, most: int) -> int:
    """A number that a client wrote; raises Malformed."""
    if text.isascii() and text.isdigit() and len(text) <= len(str(most)) and least <= int(text) <= most:
        return int(text)
    raise Malformed(f"`{name}` must be a whole number from {least} to {most}")
