"""What protects the calls to an endpoint: TLS, a client certificate, secret headers. All of it comes from files.

1. Files are read again when they change. That is looked at before a call, at most once a second, so that the first
   call after a quiet night already has the new token.
2. A change that cannot be used (half written, key and certificate of different pairs) changes nothing: what was read
   last stays in use, and the log says so once.
3. What a file holds never reaches a log or the text of an exception.
"""

import errno
import logging
import os
import re
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from carpool.core.clock import Clock, monotonic
from carpool.core.names import TlsFiles

if TYPE_CHECKING:  # slow to import, and the commands that only read the configuration mostly do without
    import ssl

logger = logging.getLogger("carpool.upstream")

LOOK_EVERY_S = 1.0
FILE_BYTES_MAX = 1024 * 1024

_TOKEN = re.compile(r"[\x21-\x7e]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?")

Made = TypeVar("Made")


class Pems(NamedTuple):
    """The content of the files of TLS, for libraries that do not read files; None where there is none."""

    ca: bytes | None
    key: bytes | None
    cert: bytes | None


class UpstreamSecurity(TlsFiles, frozen=True):
    """The files that protect the calls to the endpoints of one model; each is optional."""

    # Sent as `Authorization: Bearer …`.
    token_file: str = ""
    # Names of further headers, each with the file that holds its value.
    header_files: tuple[tuple[str, str], ...] = ()

    def ssl_context(self) -> "ssl.SSLContext":
        """Read the certificates; raises OSError (of which ssl.SSLError is one) or ValueError."""
        import ssl

        context = ssl.create_default_context(cafile=self.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        if self.cert:
            # An encrypted key would otherwise be asked for on the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        return context

    def pems(self) -> Pems:
        """Read the certificates as they are, and see that they can be used; raises OSError or ValueError."""
        found = self._read_pems()
        self.ssl_context()
        if self._read_pems() != found:  # then `ssl_context` may have checked other bytes
            raise OSError(errno.EAGAIN, "the files changed while they were read")
        return found

    def _read_pems(self) -> Pems:
        return Pems(*(read_file(path) if path else None for path in (self.ca, self.key, self.cert)))

    def headers(self) -> dict[str, str]:
        """Read the secret headers; raises OSError or ValueError."""
        headers = {name: read_header_value(path) for name, path in self.header_files}
        if self.token_file:
            headers["Authorization"] = f"Bearer {read_token(self.token_file)}"
        return headers


class Credentials:
    """The security of one model as it is now: what its files held when they were last looked at."""

    def __init__(self, security: UpstreamSecurity, clock: Clock = monotonic) -> None:
        secrets = [security.token_file, *(path for _, path in security.header_files)]
        certificates = [security.ca, security.cert, security.key]
        # What to send with a call; the TLS for new connections; the same for a library that makes its TLS by itself.
        # Each is the same object until a file changes.
        self.headers = Reread(secrets, security.headers, clock).now
        self.ssl_context = Reread(certificates, security.ssl_context, clock).now
        self.pems = Reread(certificates, security.pems, clock).now


class Reread(Generic[Made]):
    """Something made of files, and made again when they have changed."""

    def __init__(self, paths: list[str], make: Callable[[], Made], clock: Clock = monotonic) -> None:
        self._paths = [path for path in paths if path]
        self._make = make
        self._clock = clock
        self._made: Made | None = None
        # The content of each file, None for one that cannot be read. Content, and not the time of change, because
        # clocks of file systems are too coarse to tell two writes apart.
        self._contents: list[bytes | None] = []
        self._look_at = 0.0

    def now(self) -> Made:
        """What the files make, not older than a second; raises what `make` does, but only the first time."""
        if self._made is None:
            self._look()
            self._made = self._make()
        elif self._paths and self._clock() >= self._look_at and self._look():
            try:
                self._made = self._make()
                logger.info("files that protect the upstream changed; now in use: %s", ", ".join(self._paths))
            except (OSError, ValueError) as failure:
                # The class, and the system's own words: nothing of the content.
                reason = failure.strerror if isinstance(failure, OSError) else failure
                logger.warning(
                    "files that protect the upstream changed and are not usable (%s: %s); the last ones stay: %s",
                    type(failure).__name__,
                    reason,
                    ", ".join(self._paths),
                )
        return self._made

    def _look(self) -> bool:
        """Read the files; whether they changed. Small and local, so read in the event loop."""
        self._look_at = self._clock() + LOOK_EVERY_S
        before = self._contents
        self._contents = [_content(path) for path in self._paths]
        return self._contents != before


def read_token(path: str) -> str:
    """The bearer token that a file holds; raises OSError or ValueError."""
    token = read_file(path).decode("latin-1").strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError("the file must hold one token and nothing else: printable ASCII without spaces")
    return token


def read_header_value(path: str) -> str:
    """The value of a header that a file holds; raises OSError or ValueError."""
    value = read_file(path).decode("latin-1").strip()
    if not _HEADER_VALUE.fullmatch(value):
        raise ValueError("the file must hold one line of printable ASCII")
    return value


def read_file(path: str) -> bytes:
    """A small file, whole; raises OSError."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"longer than {FILE_BYTES_MAX} bytes")
    return content


def _open_at_once(path: str, flags: int) -> int:
    # Opening a named pipe would otherwise wait until a process writes to it.
    return os.open(path, flags | os.O_NONBLOCK)


def _content(path: str) -> bytes | None:
    try:
        return read_file(path)
    except OSError:
        return None
