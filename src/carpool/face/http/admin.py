"""The routes for operators, on the admin port."""

from collections.abc import Callable

import msgspec

from carpool.core.errors import CarpoolError, NotFound
from carpool.core.ports import DeadLetterDesk
from carpool.core.snapshot import Snapshot
from carpool.core.timeline import RequestState
from carpool.core.webhook import Outbox
from carpool.face.http.admin_guard import COOKIE, AdminGuard
from carpool.face.http.answers import Ready
from carpool.face.http.dead_letters import DeadLetterRoutes
from carpool.face.http.exchange import Exchange
from carpool.face.http.live import Viewers
from carpool.face.http.page import page_files
from carpool.face.http.problem import respond_problem
from carpool.face.http.router import Route, Router, split_target
from carpool.face.http.webhooks import WebhookRoutes

# Called with the state of a request; with None if it is not known.
FoundRequest = Callable[[RequestState | CarpoolError | None], None]


class AdminRoutes:
    """Health, readiness, metrics and single requests. What it shows is the snapshot that it takes."""

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
        self._snapshot = snapshot
        self._ready = ready
        self._metrics = metrics
        self._find_request = find_request
        self._openapi = openapi
        self._router = Router()
        self._router.add(b"GET", b"/internal/health", self.health)
        self._router.add(b"GET", b"/internal/ready", self.ready)
        self._router.add(b"GET", b"/internal/fleet", self.fleet)
        self._router.add(b"GET", b"/internal/requests/", self.request)
        self._router.add(b"GET", b"/metrics", self.metrics)
        self._router.add(b"GET", b"/openapi.json", self.openapi)
        self._router.add(b"GET", b"/internal/live", live.join)
        self._router.add(b"POST", b"/internal/login", self.login)
        self._router.add(b"DELETE", b"/internal/login", self.logout)
        DeadLetterRoutes(dead_letters).add_to(self._router)
        WebhookRoutes(webhooks).add_to(self._router)
        for path, file in page_files().items():
            self._router.add(b"GET", path, file.show)
        # Paths that need no token: they show no data of this process.
        self._open = {*page_files(), b"/internal/login"}

    def add(self, method: bytes, path: bytes, route: Route) -> None:
        """Serve one more path."""
        self._router.add(method, path, route)

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

    def health(self, exchange: Exchange, _: str) -> None:
        """`GET /internal/health`."""
        exchange.respond(200, msgspec.json.encode(self._snapshot().health))

    def ready(self, exchange: Exchange, _: str) -> None:
        """`GET /internal/ready`: 200, or 503 with the reason."""

        def answer(reason: str | None) -> None:
            if reason is None:
                exchange.respond(200, msgspec.json.encode(Ready(True)))
            else:
                exchange.respond(503, msgspec.json.encode(Ready(False, reason)))

        self._ready(answer)

    def fleet(self, exchange: Exchange, _: str) -> None:
        """`GET /internal/fleet`: every endpoint of every model."""
        exchange.respond(200, msgspec.json.encode(self._snapshot().fleet))

    def request(self, exchange: Exchange, request_id: str) -> None:
        """`GET /internal/requests/{id}`: the state of a live or recent request."""

        def answer(found: RequestState | CarpoolError | None) -> None:
            if found is None:
                found = NotFound("this request is neither live nor recent")
            if isinstance(found, CarpoolError):
                respond_problem(exchange, found)
            else:
                exchange.respond(200, msgspec.json.encode(found))

        self._find_request(request_id, answer)

    def metrics(self, exchange: Exchange, _: str) -> None:
        """`GET /metrics`."""
        exchange.respond(200, *self._metrics(exchange.headers.get(b"accept", b"")))

    def openapi(self, exchange: Exchange, _: str) -> None:
        """`GET /openapi.json`."""
        exchange.respond(200, self._openapi)
