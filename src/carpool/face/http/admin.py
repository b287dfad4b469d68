"""The routes for operators, on the admin port: state, metrics, single requests, dead letters, webhooks, the live page.

Inputs are shown one at a time, with their dead letter, and nowhere else.
"""

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable
from functools import cache, partial
from importlib.resources import files
from typing import Any

import msgspec

from carpool.core.clock import rfc3339
from carpool.core.dead_letter import DeadLetterSummary, dead_letter_causes
from carpool.core.errors import CarpoolError, InternalError, Malformed, NotFound
from carpool.core.ports import DeadLetterDesk
from carpool.core.snapshot import Snapshot
from carpool.core.tensors import as_input
from carpool.core.timeline import RequestState
from carpool.core.webhook import Outbox
from carpool.face.http import answers
from carpool.face.http.admin_guard import COOKIE, AdminGuard
from carpool.face.http.exchange import Exchange
from carpool.face.http.gateway import possible_task_id
from carpool.face.http.live import Viewers
from carpool.face.http.problem import respond_problem
from carpool.face.http.router import Route, Router, query_of, split_target

logger = logging.getLogger("carpool")

LISTED = 100
LISTED_MAX = 1000
# What every JSON reader takes for a whole number.
LETTER_ID_MAX = 2**53 - 1

# Called with the state of a request; with None if it is not known.
FoundRequest = Callable[[RequestState | CarpoolError | None], None]
# Status of an answer, and what it tells; None: it has no body.
StatusAndPage = tuple[int, object]

# The page loads scripts, styles and data from its own address only; no site may put it into a frame.
SAFETY = (
    b"Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    b"X-Content-Type-Options: nosniff\r\n"
    b"Referrer-Policy: no-referrer\r\n"
    b"Cross-Origin-Resource-Policy: same-origin\r\n"
    b"Cross-Origin-Opener-Policy: same-origin\r\n"
    # A new version of Carpool comes with a new page.
    b"Cache-Control: no-cache\r\n"
    b"Vary: Accept-Encoding\r\n"
)
TYPES = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
}
PAGE_FILES = ("index.html", "page.css", "page.js", "cars.js", "charts.js", "demo.js", "icon.svg")


class AdminRoutes:
    """Serves operators. What it shows is the snapshot that it takes."""

    def __init__(
        self,
        *,
        guard: AdminGuard,
        snapshot: Callable[[], Snapshot],
        ready: Callable[[Callable[[str | None], None]], None],
        # Given the `Accept` header: the text, and its type.
        metrics: Callable[[bytes], tuple[bytes, bytes]],
        find_request: Callable[[str, FoundRequest], None],
        dead_letters: DeadLetterDesk,
        webhooks: Outbox,
        openapi: bytes,
        live: Viewers,
    ) -> None:
        self._guard = guard
        self._find_request = find_request
        self._letters = dead_letters
        self._outbox = webhooks
        router = self._router = Router()
        self.add = router.add
        paths = {"/page/" + name if name != "index.html" else "/": name for name in PAGE_FILES}
        for path, name in paths.items():
            router.add(b"GET", path.encode(), partial(_show_file, name))
        # Paths that need no token: they show no data of this process.
        self._open = {*(path.encode() for path in paths), b"/internal/login"}
        self._run = Awaited()
        for target, route in {
            "GET /internal/health": lambda exchange, _: _show(exchange, (200, snapshot().health)),
            "GET /internal/ready": lambda exchange, _: ready(partial(_tell_ready, exchange)),
            "GET /internal/fleet": lambda exchange, _: _show(exchange, (200, snapshot().fleet)),
            "GET /internal/scale": lambda exchange, _: _show(exchange, (200, snapshot().scale)),
            "GET /internal/requests/": self.request,
            "GET /metrics": lambda exchange, _: exchange.respond(200, *metrics(exchange.headers.get(b"accept", b""))),
            "GET /openapi.json": lambda exchange, _: exchange.respond(200, openapi),
            "GET /internal/live": live.join,
            "POST /internal/login": self.login,
            "DELETE /internal/login": self.logout,
            "GET /internal/dead-letters": self._run.route(self.list_letters),
            "DELETE /internal/dead-letters": self._run.route(self.drop_letters),
            "POST /internal/dead-letters/replay": self._run.route(self.replay_letters),
            "GET /internal/dead-letters/": self._run.route(self.show_letter),
            "DELETE /internal/dead-letters/": self._run.route(self.drop_letter),
            "POST /internal/dead-letters/*/replay": self._run.route(self.replay_letter),
            "GET /internal/webhooks": self._run.route(self.list_webhooks),
            "POST /internal/webhooks/retry": self._run.route(self.retry_webhooks),
            "POST /internal/webhooks/*/retry": self._run.route(self.retry_webhook),
        }.items():
            method, _, found_at = target.encode().partition(b" ")
            router.add(method, found_at, route)

    def __call__(self, exchange: Exchange) -> None:
        """Serve one exchange of an operator."""
        is_open = split_target(exchange.target)[0] in self._open
        refusal = self._guard.refusal(exchange.method, exchange.headers, exchange.sink.peer.address, is_open=is_open)
        if refusal is not None:
            respond_problem(exchange, refusal)
        else:
            self._router.serve(exchange)

    def login(self, exchange: Exchange, _: str) -> None:
        """`POST /internal/login`: a cookie for a token, which is the whole body."""
        cookie = self._guard.login(exchange.body.strip(), exchange.sink.peer.address)
        if isinstance(cookie, CarpoolError):
            respond_problem(exchange, cookie)
        else:
            exchange.respond(204, b"", b"", b"Set-Cookie: %b\r\n" % cookie)

    def logout(self, exchange: Exchange, _: str) -> None:
        """`DELETE /internal/login`: forget the cookie."""
        exchange.respond(204, b"", b"", b"Set-Cookie: %b=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict\r\n" % COOKIE)

    def request(self, exchange: Exchange, request_id: str) -> None:
        """`GET /internal/requests/{id}`: the state of a live or recent request."""

        def answer(found: RequestState | CarpoolError | None) -> None:
            if found is None:
                found = NotFound("this request is neither live nor recent")
            if isinstance(found, CarpoolError):
                respond_problem(exchange, found)
            else:
                _show(exchange, (200, found))

        self._find_request(request_id, answer)

    # Dead letters

    async def list_letters(self, exchange: Exchange, _: str) -> StatusAndPage:
        """`GET /internal/dead-letters`: some of them, without their inputs."""
        after = whole_number(query_of(exchange).get("after", "0"), "after", 0, LETTER_ID_MAX)
        letters = [
            answers.LetterListed(**summary_of(letter)) for letter in await self._letters.page(after, limit_of(exchange))
        ]
        return 200, answers.LettersListed(letters, self._letters.total())

    async def show_letter(self, exchange: Exchange, letter_id: str) -> StatusAndPage:
        """`GET /internal/dead-letters/{id}`: one, with its input."""
        letter = await self._letters.show(known_form(letter_id))
        value, parameters = msgspec.Raw(as_input(letter.input)), msgspec.Raw(letter.parameters or b"null")
        return 200, answers.LetterShown(
            **summary_of(letter.summary), owner=letter.owner, input=value, parameters=parameters
        )

    async def replay_letter(self, exchange: Exchange, letter_id: str) -> StatusAndPage:
        """`POST /internal/dead-letters/{id}/replay`: make one a task again."""
        return 202, await self._letters.replay(known_form(letter_id))

    async def replay_letters(self, exchange: Exchange, _: str) -> StatusAndPage:
        """`POST /internal/dead-letters/replay`: make all, or those of one cause, tasks again."""
        cause, causes = query_of(exchange).get("cause"), dead_letter_causes()
        if cause is not None and cause not in causes:
            raise Malformed(f"`cause` must be one of {', '.join(sorted(causes))}")
        return 202, await self._letters.replay_all(cause)

    async def drop_letter(self, exchange: Exchange, letter_id: str) -> StatusAndPage:
        """`DELETE /internal/dead-letters/{id}`."""
        await self._letters.drop(known_form(letter_id))
        return 204, None

    async def drop_letters(self, exchange: Exchange, _: str) -> StatusAndPage:
        """`DELETE /internal/dead-letters?all=true`."""
        if query_of(exchange).get("all") != "true":
            raise Malformed("this drops every dead letter; say so with `?all=true`, or name one by its id")
        return 200, answers.LettersDropped(await self._letters.drop_all())

    # Webhooks

    async def list_webhooks(self, exchange: Exchange, _: str) -> StatusAndPage:
        """`GET /internal/webhooks`: those that are due next."""
        found = await self._outbox.page(limit_of(exchange))
        return 200, answers.WebhooksListed(found, *self._outbox.waiting())

    async def retry_webhooks(self, exchange: Exchange, _: str) -> StatusAndPage:
        """`POST /internal/webhooks/retry`: all are due now."""
        return 202, answers.WebhooksRetried(await self._outbox.retry(None))

    async def retry_webhook(self, exchange: Exchange, task_id: str) -> StatusAndPage:
        """`POST /internal/webhooks/{task_id}/retry`: one is due now."""
        if not await self._outbox.retry(possible_task_id(task_id)):
            raise NotFound("there is no such webhook; it was delivered, given up, or is being sent now")
        return 202, answers.WebhooksRetried(1)


class Awaited:
    """Runs routes in tasks of their own."""

    def __init__(self) -> None:
        # The event loop holds its tasks only weakly.
        self._running: set[asyncio.Task[None]] = set()

    def route(self, work: Callable[[Exchange, str], Awaitable[StatusAndPage]]) -> Route:
        """A route that answers with what `work` returns."""

        def route(exchange: Exchange, rest: str) -> None:
            task = asyncio.get_running_loop().create_task(self._serve(work(exchange, rest), exchange))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

        return route

    async def _serve(self, work: Awaitable[StatusAndPage], exchange: Exchange) -> None:
        try:
            _show(exchange, await work)
        except CarpoolError as error:
            respond_problem(exchange, error)
        except Exception:
            logger.exception("an operator's request failed")
            respond_problem(exchange, InternalError("the gateway failed on this request"))


def _show(exchange: Exchange, answer: StatusAndPage) -> None:
    status, page = answer
    exchange.respond(status, b"" if page is None else msgspec.json.encode(page))


def _tell_ready(exchange: Exchange, reason: str | None) -> None:
    _show(exchange, (200, answers.Ready(True)) if reason is None else (503, answers.Ready(False, reason)))


@cache
def page_file(name: str) -> tuple[bytes, bytes]:
    """A file of the live page, as it is and compressed: the same for every client."""
    plain = files("carpool.face").joinpath("page", name).read_bytes()
    return plain, gzip.compress(plain, mtime=0)


def _show_file(name: str, exchange: Exchange, _: str) -> None:
    plain, packed = page_file(name)
    content_type = TYPES[name.rpartition(".")[2]]
    if b"gzip" in exchange.headers.get(b"accept-encoding", b""):
        exchange.respond(200, packed, content_type, SAFETY + b"Content-Encoding: gzip\r\n")
    else:
        exchange.respond(200, plain, content_type, SAFETY)


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


def limit_of(exchange: Exchange) -> int:
    """How many an operator wants to see; raises Malformed."""
    return whole_number(query_of(exchange).get("limit", str(LISTED)), "limit", 1, LISTED_MAX)


def whole_number(text: str, name: str, least: int, most: int) -> int:
    """A number that a client wrote; raises Malformed."""
    if text.isascii() and text.isdigit() and len(text) <= len(str(most)) and least <= int(text) <= most:
        return int(text)
    raise Malformed(f"`{name}` must be a whole number from {least} to {most}")
