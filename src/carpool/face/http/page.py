"""The files of the live page. They are the same for every client, and hold no data of a process."""

import gzip
from functools import cache
from importlib.resources import files

from carpool.face.http.exchange import Exchange

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
)
TYPES = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
}
NAMES = ("index.html", "page.css", "page.js", "cars.js", "charts.js", "demo.js", "icon.svg")


class PageFile:
    """One file, as it is and compressed."""

    def __init__(self, name: str) -> None:
        self._plain = files("carpool.face").joinpath("page", name).read_bytes()
        self.packed = gzip.compress(self._plain, mtime=0)
        self._type = TYPES[name.rpartition(".")[2]]

    def show(self, exchange: Exchange, _: str) -> None:
        """`GET` it."""
        headers = SAFETY + b"Vary: Accept-Encoding\r\n"
        if b"gzip" in exchange.headers.get(b"accept-encoding", b""):
            exchange.respond(200, self.packed, self._type, headers + b"Content-Encoding: gzip\r\n")
        else:
            exchange.respond(200, self._plain, self._type, headers)


@cache
def page_files() -> dict[bytes, PageFile]:
    """The files by their paths."""
    found = {f"/page/{name}".encode(): PageFile(name) for name in NAMES}
    found[b"/"] = found.pop(b"/page/index.html")
    return found
