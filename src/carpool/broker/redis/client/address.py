"""Where Redis is: `broker.url`, read into its parts. Pure.

| URL | what |
|---|---|
| `redis://[user:password@]host[:6379][/db]` | one server |
| `redis+sentinel://[user:password@]host[:26379][,…]/service[/db]` | the master that Sentinels name |
| `redis+cluster://[user:password@]host[:6379][,…]` | a Cluster, asked for its nodes at any of these |

`rediss` in place of `redis` means TLS. Passwords are percent-encoded, IPv6 addresses stand in brackets. The password is
in no text that this module makes, errors included.
"""

import re
from ipaddress import IPv6Address
from typing import Any, Literal, NoReturn
from urllib.parse import unquote_to_bytes

import msgspec

from carpool.core.names import TlsFiles

URL_CHARS_MAX = 4096
HOSTS_MAX = 64
PORT_MAX = 65535
DB_MAX = 1_000_000
REDIS_PORT = 6379
SENTINEL_PORT = 26379
NO_FILES = TlsFiles()

Kind = Literal["single", "sentinel", "cluster"]
HostPort = tuple[str, int]

_SCHEMES: dict[str, tuple[Kind, bool]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
_BROKEN_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_NUMBER = re.compile(r"[0-9]{1,7}")
_EXAMPLE = {
    "single": "redis://host:6379/0",
    "sentinel": "redis+sentinel://host1:26379,host2:26379/mymaster",
    "cluster": "redis+cluster://host1:6379,host2:6379",
}


class BadBrokerUrlError(ValueError):
    """The URL cannot be used; the text says why and what to write."""


class BrokerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where Redis is and how to log in."""

    kind: Kind
    # The server, the Sentinels, or some nodes of the Cluster.
    hosts: tuple[HostPort, ...]
    username: str = ""
    password: str = ""
    db: int = 0
    tls: bool = False
    # The name by which Sentinels know the master.
    service: str = ""
    files: TlsFiles = NO_FILES

    def __str__(self) -> str:
        """The URL, with dots where the password is."""
        scheme = ("rediss" if self.tls else "redis") + ("" if self.kind == "single" else f"+{self.kind}")
        login = f"{self.username}:…@" if self.password else f"{self.username}@" if self.username else ""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        service = f"/{self.service}" if self.service else ""
        return f"{scheme}://{login}{hosts}{service}" + (f"/{self.db}" if self.db else "")

    def __repr__(self) -> str:
        return f"BrokerAddress({str(self)!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich shows, which would show every field otherwise."""
        return [("url", str(self))]


def parse_broker_url(url: str, *, password: str | None = None, files: TlsFiles = NO_FILES) -> BrokerAddress:
    """Read a broker URL; raises BadBrokerUrlError. `password` is one that was kept apart from the URL."""
    if len(url) > URL_CHARS_MAX:
        _bad(f"it is longer than {URL_CHARS_MAX} characters")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        _bad(f"it must begin with one of {', '.join(f'{name}://' for name in _SCHEMES)}")
    kind, tls = _SCHEMES[scheme]
    authority, _, path = rest.partition("/")
    if any(mark in rest for mark in "?#") or "@" in path:
        _bad("it has no ?query or #fragment, and in a password write / as %2F, ? as %3F, # as %23, @ as %40")
    login, _, hosts = authority.rpartition("@")
    username, _, own_password = login.partition(":")
    if own_password and password:
        _bad("there is a password in it and another one beside it: give one of them")
    _check_files(tls, scheme, files)
    service, db = _read_path(kind, path)
    return BrokerAddress(
        kind=kind,
        hosts=_read_hosts(kind, hosts),
        username=_decode(username, "user name"),
        password=password or _decode(own_password, "password"),
        db=db,
        tls=tls,
        service=service,
        files=files,
    )


def _bad(reason: str) -> NoReturn:
    raise BadBrokerUrlError(f"the broker's URL cannot be used: {reason}")


def _check_files(tls: bool, scheme: str, files: TlsFiles) -> None:
    if bool(files.cert) != bool(files.key):
        _bad("a client's certificate and its key belong together: give both files, or none")
    if not tls and (files.ca or files.cert):
        _bad(f"there are files for TLS, but {scheme}:// does not use it: write {scheme.replace('redis', 'rediss')}://")


def _decode(text: str, what: str) -> str:
    if _BROKEN_PERCENT.search(text):
        _bad(f"there is a % in the {what} that begins no character: write % as %25")
    try:
        return unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        # Without the cause, which quotes the text.
        raise BadBrokerUrlError(f"the broker's URL cannot be used: the {what} is not UTF-8") from None


def _read_hosts(kind: Kind, text: str) -> tuple[HostPort, ...]:
    default_port = SENTINEL_PORT if kind == "sentinel" else REDIS_PORT
    parts = text.split(",")
    if len(parts) > HOSTS_MAX:
        _bad(f"it names more than {HOSTS_MAX} hosts; a few are enough to find the others")
    if kind == "single" and len(parts) > 1:
        _bad("it names several hosts: write redis+cluster:// for a Cluster, redis+sentinel:// for Sentinels")
    return tuple(_read_host(kind, part, default_port) for part in parts)


def _read_host(kind: Kind, text: str, default_port: int) -> HostPort:
    # What is wrong is not quoted: it may be a piece of a password.
    found = _HOST_AND_PORT.fullmatch(text)
    if not found:
        _bad(f"a host is missing or malformed: write {_EXAMPLE[kind]}, IPv6 addresses in brackets")
    port = int(found["port"] or default_port)
    if not 1 <= port <= PORT_MAX:
        _bad(f"a port is not between 1 and {PORT_MAX}")
    if not found["v6"]:
        return found["name"], port
    try:
        return str(IPv6Address(found["v6"])), port
    except ValueError:
        raise BadBrokerUrlError("the broker's URL cannot be used: what is in brackets is no IPv6 address") from None


def _read_path(kind: Kind, path: str) -> tuple[str, int]:
    """The service and the database."""
    service, db = "", path
    if kind == "sentinel":
        service, _, db = path.partition("/")
        service = _decode(service, "name of the service")
        if not service:
            _bad(f"the name by which the Sentinels know the master is missing: write {_EXAMPLE[kind]}")
    db = db.removesuffix("/")
    if kind == "cluster" and db:
        _bad(f"a Cluster has no databases: write {_EXAMPLE[kind]}")
    if not db:
        return service, 0
    if not _NUMBER.fullmatch(db) or int(db) > DB_MAX:
        _bad(f"after the last / comes the number of a database: write {_EXAMPLE[kind]}")
    return service, int(db)
