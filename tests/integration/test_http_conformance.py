"""The HTTP face against the cases of two other parsers: it takes what they take and refuses what they refuse.

The cases are not ours and not in this repository: they come out of the source distributions of aiohttp (which has
llhttp's fixtures) and h11, fetched when the test first runs. Where the face decides otherwise, the case stands in
DIFFERENCES with the reason. A new difference fails the test, and so does one that is no longer there.
`docs/http-conformance.md` explains the same list.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from carpool.face.http.connection import Connection
from carpool.face.http.exchange import Exchange
from carpool.face.http.state import HttpLimits, HttpState

SOURCES = ("aiohttp==3.14.5", "h11==0.16.0")
# One worker fetches them.
pytestmark = pytest.mark.xdist_group("http-conformance")


class Verdict(NamedTuple):
    """What became of the bytes: how many whole requests came out, and whether the rest was refused."""

    requests: int
    refused: bool


class Case(NamedTuple):
    name: str
    data: bytes
    expected: Verdict


# Why the face decides otherwise; docs/http-conformance.md says more about each.
LENIENT = "the fixture switches on a leniency of llhttp that the face leaves off"
UPGRADE = "an Upgrade is ignored: the request is answered, and what follows it must be HTTP/1.1 again"
CONNECT = "CONNECT is refused: this is not a proxy"
AFTER_CLOSE = "what follows the last request of a connection is thrown away, not answered"
VERSION = "HTTP/0.9 is refused with 505"
HTTP2 = "the fixture stops where HTTP/2 begins; the face answers 505"
ENCODING = "no transfer encoding but chunked is taken"
SKIP_BODY = "the fixture tells the parser to expect no body whatever the length says; the face waits for it"
FOLDING = "a folded header is refused, as RFC 9112 allows"
CONTROL = "a control character in a header is refused"
CHUNK_SPACE = "white space in a chunk's first line is refused"
TWO_SPACES = "two spaces before the version are taken as one; the target is the same"

TOOK_NONE, TOOK_ONE = Verdict(0, True), Verdict(1, True)
DIFFERENCES: dict[str, tuple[Verdict, str]] = {
    "connection: CRLF between requests, explicit `close`": (Verdict(1, False), AFTER_CLOSE),
    "connection: CRLF between requests, explicit `close` followed by tab": (Verdict(1, False), AFTER_CLOSE),
    "connection: No restart when keep-alive is off (1.0)": (Verdict(1, False), AFTER_CLOSE),
    "connection: Emitting part of body and pausing": (TOOK_ONE, UPGRADE),
    "connection: Multiple tokens with folding and LWS": (TOOK_ONE, UPGRADE),
    "connection: Upgrade GET request": (TOOK_ONE, UPGRADE),
    "connection: Upgrade POST request": (TOOK_ONE, UPGRADE),
    "connection: Invalid whitespace token with `Connection` header field (lenient) [lenient-headers]": (
        TOOK_NONE,
        LENIENT,
    ),
    "connection: Multiple tokens with folding [lenient-headers]": (TOOK_NONE, LENIENT),
    "connection: Multiple tokens with folding, LWS, and CRLF [lenient-headers]": (TOOK_NONE, LENIENT),
    "content-length: Content-Length reset when no body is received": (Verdict(0, False), SKIP_BODY),
    "content-length: Invalid whitespace token with `Content-Length` header field (lenient) [lenient-headers]": (
        TOOK_NONE,
        LENIENT,
    ),
    "content-length: Missing CRLF-CRLF before body (lenient) [lenient-optional-lf-after-cr]": (TOOK_NONE, LENIENT),
    "content-length: No error on simultaneous `Content-Length` and `Transfer-Encoding: identity` (lenient) "
    "[lenient-chunked-length]": (TOOK_NONE, LENIENT),
    "invalid: Headers separated by dummy characters (lenient) [lenient-optional-lf-after-cr]": (TOOK_NONE, LENIENT),
    "invalid: Only LFs present (lenient) [lenient-all]": (TOOK_NONE, LENIENT),
    "invalid: Spaces before headers (lenient) [lenient-headers]": (TOOK_NONE, LENIENT),
    "lenient-header-value-relaxed: Control char in header value (relaxed) [lenient-header-value-relaxed]": (
        TOOK_NONE,
        LENIENT,
    ),
    "lenient-headers: Empty headers separated by CR (lenient) [lenient-headers]": (TOOK_NONE, LENIENT),
    "lenient-headers: Header value (lenient) [lenient-headers]": (TOOK_NONE, LENIENT),
    "lenient-headers: Second request header value (lenient) [lenient-headers]": (TOOK_ONE, LENIENT),
    "lenient-version: Invalid HTTP version (lenient) [lenient-version]": (TOOK_NONE, LENIENT),
    "method: CONNECT request": (TOOK_NONE, CONNECT),
    "method: CONNECT request with CAPS": (TOOK_NONE, CONNECT),
    "method: CONNECT with body": (TOOK_NONE, CONNECT),
    "method: PRI request HTTP2": (TOOK_NONE, HTTP2),
    "sample: Line folding in header value with CRLF [lenient-headers]": (TOOK_NONE, LENIENT),
    "sample: No HTTP version": (TOOK_NONE, VERSION),
    "sample: No LF after CR (lenient) [lenient-optional-lf-after-cr]": (TOOK_NONE, LENIENT),
    "sample: X-SSL-Nonsense [lenient-headers]": (TOOK_NONE, LENIENT),
    "transfer-encoding: Chunk data not terminated by CRLF (lenient) [lenient-optional-crlf-after-chunk]": (
        TOOK_NONE,
        LENIENT,
    ),
    "transfer-encoding: Chunk header not terminated by CRLF (lenient) [lenient-optional-lf-after-cr]": (
        TOOK_NONE,
        LENIENT,
    ),
    "transfer-encoding: POST with `Transfer-Encoding` and `Content-Length` (lenient) [lenient-chunked-length]": (
        TOOK_NONE,
        LENIENT,
    ),
    "transfer-encoding: POST with `chunked` and duplicate transfer-encoding (lenient) [lenient-transfer-encoding]": (
        TOOK_NONE,
        LENIENT,
    ),
    "transfer-encoding: POST with `chunked` before other transfer-coding (lenient) [lenient-transfer-encoding]": (
        TOOK_NONE,
        LENIENT,
    ),
    "transfer-encoding: Space after chunk header (lenient) [lenient-spaces-after-chunk-size]": (TOOK_NONE, LENIENT),
    "transfer-encoding: POST with `chunked` as last transfer-encoding": (TOOK_NONE, ENCODING),
    "transfer-encoding: POST with `chunked` as last transfer-encoding (multiple headers)": (TOOK_NONE, ENCODING),
    "uri: Underscore in hostname": (TOOK_NONE, CONNECT),
    "h11 chunked 7: '5; hello=there'": (TOOK_NONE, CHUNK_SPACE),
    "h11 chunked 8: '5   \\t '": (TOOK_NONE, CHUNK_SPACE),
    "h11 head 12: 'HEAD /foo HTTP/1.1'": (TOOK_NONE, CONTROL),
    "h11 head 16: 'HEAD /foo HTTP/1.1'": (TOOK_NONE, FOLDING),
    "h11 head 25: 'HEAD /  HTTP/1.1'": (Verdict(1, False), TWO_SPACES),
}


class NoTransport(asyncio.Transport):
    """A transport to nowhere."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


class HostGiven(Connection):
    """llhttp asks for no Host and its fixtures rarely have one; here they are given one, so that the rest shows."""

    def on_headers_complete(self) -> None:
        if not any(name.lower() == b"host" for name, _ in self.pairs):
            self.pairs.append((b"Host", b"given"))
        super().on_headers_complete()


def verdict(data: bytes, kind: type[Connection]) -> Verdict:
    """What the face does with these bytes, in one read and byte by byte."""
    verdicts = set()
    for reads in ([data], [bytes((byte,)) for byte in data]):
        seen: list[Exchange] = []

        def route(exchange: Exchange, seen: list[Exchange] = seen) -> None:
            seen.append(exchange)
            exchange.respond(200, b"")

        server = HttpState(route, HttpLimits())
        connection = kind(server)
        connection.connection_made(NoTransport())
        for read in reads:
            connection.data_received(read)
        verdicts.add(Verdict(len(seen), bool(server.problems)))
    assert len(verdicts) == 1, f"whole and byte by byte differ: {verdicts}"
    return verdicts.pop()


# Sources are fetched once.
pytestmark = pytest.mark.xdist_group("conformance")


@pytest.fixture(scope="module")
def sources(request: pytest.FixtureRequest) -> Path:
    """The two source distributions, unpacked; kept in pytest's cache."""
    directory = request.config.cache.mkdir("http-conformance")
    for source in SOURCES:
        unpacked = directory / source.replace("==", "-")
        if unpacked.is_dir():
            continue
        # pip asks a source what it is. Without an environment of its own for that it takes seconds, not a minute.
        for flags in (["--no-build-isolation"], []):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", *flags]
            done = subprocess.run(
                [*command, "--dest", str(directory), source], capture_output=True, text=True, timeout=240, check=False
            )
            if done.returncode == 0:
                break
        else:
            pytest.skip(f"the package registry cannot be reached for {source}: {done.stderr.strip()[-200:]}")
        with tarfile.open(next(directory.glob(f"{unpacked.name}.tar.*"))) as archive:
            archive.extractall(directory, filter="data")
    return directory


# llhttp's fixtures: Markdown, each case a comment with its kind, an `http` block and the parser's `log`.

_BLOCK = r"(?:(?!```).)*"
_CASE = re.compile(
    rf"<!--\s*meta=(?P<meta>\{{.*?\}})\s*-->\s*```http\n(?P<http>{_BLOCK})```{_BLOCK}```log\n(?P<log>{_BLOCK})```",
    re.DOTALL,
)
_HEADING = re.compile(r"^(?:#+ (.+)|(.+)\n=+)$", re.MULTILINE)


def llhttp_bytes(block: str) -> bytes:
    """The bytes that a fixture stands for, by the rules of llhttp's own test runner."""
    text = block.removesuffix("\n")
    text = text.replace("\\\n", "").replace("\n", "\r\n")
    for written, meant in (("\\r", "\r"), ("\\n", "\n"), ("\\t", "\t"), ("\\f", "\f")):
        text = text.replace(written, meant)
    return re.sub(r"\\x([0-9a-fA-F]+)", lambda found: chr(int(found[1], 16)), text).encode()


def llhttp_cases(directory: Path) -> Iterator[Case]:
    times: Counter[str] = Counter()
    for file in sorted(directory.glob("*.md")):
        text = file.read_text()
        for found in _CASE.finditer(text):
            heading = [m[1] or m[2] for m in _HEADING.finditer(text, 0, found.start())][-1]
            kind = json.loads(found["meta"])["type"].removeprefix("request").removeprefix("-")
            name = f"{file.stem}: {heading}" + (f" [{kind}]" if kind else "")
            times[name] += 1
            if times[name] > 1:
                name += f" ({times[name]})"
            log = found["log"]
            refused = "error code=" in log and "Pause on" not in log
            yield Case(name, llhttp_bytes(found["http"]), Verdict(log.count("message complete"), refused))


# h11's cases are calls in its test module: run that with recorders in place of its two checking functions.

_RECORD_H11 = """
import json
import h11.tests.test_io as cases
from h11 import LocalProtocolError

recorded = []

def recorder(check, kind_of):
    def record(reader, data, expected, **how):
        kind = kind_of(reader)
        try:
            refused = isinstance(expected, list) and LocalProtocolError in expected
            check(reader, data, expected, **how)
        except LocalProtocolError:
            refused = True
            raise
        finally:
            if kind:
                ended = not refused and (kind == "head" or any(type(e) is cases.EndOfMessage for e in expected))
                recorded.append([kind, bytes(data).decode("latin-1"), ended, refused])
    return record

request_reader = cases.READERS[cases.CLIENT, cases.IDLE]
cases.tr = recorder(cases.tr, lambda reader: "head" if reader is request_reader else "")
cases.t_body_reader = recorder(cases.t_body_reader, lambda made: "chunked" if made is cases.ChunkedReader else "")
for name in dir(cases):
    if name.startswith("test_") and "writer" not in name.lower():
        getattr(cases, name)()
print(json.dumps(recorded))
"""


def h11_cases(source: Path) -> Iterator[Case]:
    environment = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, "-c", _RECORD_H11]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    for number, (kind, text, ended, refused) in enumerate(json.loads(done.stdout.splitlines()[-1])):
        data = text.encode("latin-1")
        if kind == "chunked":
            data = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + data
        line = next((part for part in re.split(r"[\r\n]+", text) if part), "")
        yield Case(f"h11 {kind} {number}: {line[:40]!a}", data, Verdict(int(ended), refused))


def compare(cases: list[Case], kind: type[Connection], listed: dict[str, tuple[Verdict, str]]) -> None:
    """Fail on every verdict that is neither the expected one nor the listed one, and on lists that say too much."""
    found = {case.name: (verdict(case.data, kind), case.expected) for case in cases}
    assert len(found) == len(cases), "two cases have the same name"
    wrong = [
        f"{name}: {got} where {expected} was expected"
        for name, (got, expected) in found.items()
        if got != (listed[name][0] if name in listed else expected)
    ]
    gone = [name for name in listed if name not in found or found[name][0] == found[name][1]]
    assert not wrong, "\n".join(wrong)
    assert not gone, f"listed, but no longer different: {gone}"


def test_llhttp_fixtures(sources: Path) -> None:
    cases = list(llhttp_cases(sources / "aiohttp-3.14.5" / "vendor" / "llhttp" / "test" / "request"))
    assert len(cases) > 150
    listed = {name: known for name, known in DIFFERENCES.items() if not name.startswith("h11 ")}
    compare(cases, HostGiven, listed)


def test_h11_cases(sources: Path) -> None:
    cases = list(h11_cases(sources / "h11-0.16.0"))
    assert len(cases) > 20
    listed = {name: known for name, known in DIFFERENCES.items() if name.startswith("h11 ")}
    compare(cases, Connection, listed)
