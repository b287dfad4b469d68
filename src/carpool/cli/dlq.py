"""`carpool dlq`: look at dead letters, replay or drop them.

The journal belongs to the running gateway, so this asks its admin port. A dead letter holds what clients sent:
nothing of it reaches the terminal but characters that can be printed.
"""

import json as json_module
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import quote, urlsplit

import typer

if TYPE_CHECKING:
    from http.client import HTTPConnection

EXIT_FAILED, EXIT_BAD_OPTION = 1, 2
# Replaying all may take a while: every new task is on the disk before the answer comes.
CONNECT_S_MAX, ANSWER_S_MAX = 10.0, 300.0
# Between two events, of which there is one a second.
SILENT_S_MAX = 10.0
LIST_PAGE = 1000
# Longer texts in an input are cut; `--json` shows all of it.
SHOWN_CHARS_MAX = 400

dlq = typer.Typer(
    name="dlq",
    no_args_is_help=True,
    help="Dead letters: requests given up on. List, show, replay or drop them.",
    epilog="""\
[bold]Examples[/bold]

  carpool dlq list

  carpool dlq show 17

  carpool dlq replay --all --cause upstream-failed
""",
)

Admin = Annotated[str, typer.Option(metavar="URL", help="The gateway's admin port.")]
Token = Annotated[
    str,
    typer.Option(metavar="TOKEN", envvar="CARPOOL_SERVICE_TOKEN", help="A service token, if it asks for one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the gateway's answer as JSON.")]
LetterId = Annotated[int, typer.Argument(metavar="ID", min=1, help="The number that `list` shows.")]
SomeLetterId = Annotated[int | None, typer.Argument(metavar="ID", min=1, help="The number that `list` shows.")]

DEFAULT_ADMIN = "http://127.0.0.1:8001"


@dlq.command("list")
def list_letters(
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="How many at most.")] = 100,
    after: Annotated[int, typer.Option(metavar="ID", min=0, help="Only those with a larger id.")] = 0,
    admin: Admin = DEFAULT_ADMIN,
    token: Token = "",
    json: Json = False,
) -> None:
    """List dead letters, the oldest first, without their inputs."""
    gateway = Gateway(admin, token)
    letters: list[dict[str, Any]] = []
    total = 0
    while len(letters) < limit:
        wanted = min(limit - len(letters), LIST_PAGE)
        answer = gateway.ask("GET", f"/internal/dead-letters?limit={wanted}&after={after}")
        total = answer["total"]
        letters += answer["dead_letters"]
        if len(answer["dead_letters"]) < wanted:
            break
        after = letters[-1]["id"]
    if json:
        print_json({"dead_letters": letters, "total": total})
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not letters:
        typer.echo("no dead letters")
        return
    table = Table("id", "buried at", "model", "cause", "sends", "bytes", "detail", box=None, header_style="bold")
    for letter in letters:
        cells = [letter[name] for name in ("id", "buried_at", "model", "cause", "sends", "size", "detail")]
        table.add_row(*(Text(printable(str(cell))) for cell in cells))
    console = Console()
    console.print(table)
    if total > len(letters):
        typer.echo(f"{len(letters)} of {total}; see --limit and --after {letters[-1]['id']}")


@dlq.command()
def show(letter_id: LetterId, admin: Admin = DEFAULT_ADMIN, token: Token = "", json: Json = False) -> None:
    """Show one dead letter with its input and parameters."""
    letter = Gateway(admin, token).ask("GET", f"/internal/dead-letters/{letter_id}")
    if json:
        print_json(letter)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None)
    for name, value in letter.items():
        is_text = isinstance(value, str) and name not in ("input", "parameters")
        shown = value if is_text else json_module.dumps(shortened(value), ensure_ascii=False, indent=2)
        table.add_row(name.replace("_", " "), Text(printable(shown)))
    Console().print(table)


@dlq.command()
def replay(
    letter_id: SomeLetterId = None,
    everything: Annotated[bool, typer.Option("--all", help="All there are now.")] = False,
    cause: Annotated[str, typer.Option(metavar="CODE", help="With --all: only those of this cause.")] = "",
    admin: Admin = DEFAULT_ADMIN,
    token: Token = "",
    json: Json = False,
) -> None:
    """Make dead letters tasks again. Each becomes a new task with an id of its own, and leaves the list."""
    one_or_all("replay", letter_id, everything)
    if cause and not everything:
        leave("--cause goes with --all", EXIT_BAD_OPTION)
    gateway = Gateway(admin, token)
    if letter_id is not None:
        answer = gateway.ask("POST", f"/internal/dead-letters/{letter_id}/replay")
        report: dict[str, Any] = {"tasks": [answer], "reason": None}
    else:
        query = f"?cause={quote(cause, safe='')}" if cause else ""
        answer = report = gateway.ask("POST", f"/internal/dead-letters/replay{query}")
    if json:
        print_json(answer)
    else:
        for task in report["tasks"]:
            typer.echo(f"{task['id']} is now task {task['task_id']}")
        if not report["tasks"]:
            typer.echo("no dead letters to replay")
    if report["reason"] is not None:
        leave(f"some dead letters were left: {report['reason']}", EXIT_FAILED)


@dlq.command()
def drop(
    letter_id: SomeLetterId = None,
    everything: Annotated[bool, typer.Option("--all", help="All there are now.")] = False,
    admin: Admin = DEFAULT_ADMIN,
    token: Token = "",
    json: Json = False,
) -> None:
    """Remove dead letters for good."""
    one_or_all("drop", letter_id, everything)
    gateway = Gateway(admin, token)
    if letter_id is not None:
        gateway.ask("DELETE", f"/internal/dead-letters/{letter_id}")
        dropped = 1
    else:
        dropped = gateway.ask("DELETE", "/internal/dead-letters?all=true")["dropped"]
    if json:
        print_json({"dropped": dropped})
    else:
        typer.echo(f"{dropped} dropped")


class Gateway:
    """The admin port of a running gateway. No proxy and no redirect is followed: the token goes nowhere else."""

    def __init__(self, url: str, token: str, command: str = "dlq") -> None:
        # The command that error lines name.
        self._command = command
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        token = next((each.strip() for each in token.split(",") if each.strip()), "")  # of several, the newest is first
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            leave(f"--admin {printable(url)} is not a URL such as {DEFAULT_ADMIN}", EXIT_BAD_OPTION, self._command)
        if not (token.isascii() and token.isprintable()):
            leave("the token has characters that no token has", EXIT_BAD_OPTION, self._command)
        self._url = url
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(self, method: str, target: str, *, may_miss: bool = False) -> Any:
        """The gateway's JSON answer; any other answer ends the command with one line. None: there is nothing."""
        status, body = self._exchange(method, target)
        if status == 204 or (status == 404 and may_miss):
            return None
        if status >= 300:
            self._refused(status, body)
        try:
            return json_module.loads(body)
        except ValueError:
            self._stranger()

    def _refused(self, status: int, body: bytes) -> NoReturn:
        try:
            detail = str(json_module.loads(body)["detail"])
        except (ValueError, TypeError, KeyError):
            self._stranger()
        if status == 401:
            detail = "the gateway asks for a token; give it with CARPOOL_SERVICE_TOKEN or --token"
        leave(printable(detail), EXIT_BAD_OPTION if status == 400 else EXIT_FAILED, self._command)

    def lines(self, target: str) -> Iterator[bytes]:
        """The lines of a streamed answer, until the gateway ends it."""
        from http.client import HTTPException

        with self._connected() as connection:
            connection.request("GET", target, headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                self._refused(response.status, response.read())
            connection.sock.settimeout(SILENT_S_MAX)
            try:
                yield from response
            except (HTTPException, ConnectionError):
                return

    def _exchange(self, method: str, target: str) -> tuple[int, bytes]:
        """Status and body of the answer."""
        with self._connected() as connection:
            connection.sock.settimeout(ANSWER_S_MAX)
            connection.request(method, target, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read()

    @contextmanager
    def _connected(self) -> Iterator["HTTPConnection"]:
        """A connection; what goes wrong with it ends the command."""
        # Here, so that the other commands do not pay for it.
        from http.client import HTTPConnection, HTTPException, HTTPSConnection

        kind = HTTPSConnection if self._is_tls else HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_S_MAX)
        try:
            connection.connect()
            yield connection
        except HTTPException:
            self._stranger()
        except TimeoutError:
            leave(f"the gateway at {self._url} does not answer", EXIT_FAILED, self._command)
        except OSError as failure:
            hint = "is `carpool serve` running? --admin names its admin port (the clients' port + 1)"
            leave(f"no gateway at {self._url} ({failure.strerror or failure}); {hint}", EXIT_FAILED, self._command)
        finally:
            connection.close()

    def _stranger(self) -> NoReturn:
        leave(
            f"what answers at {self._url} is not the admin port of a gateway; see --admin", EXIT_FAILED, self._command
        )


def one_or_all(command: str, letter_id: int | None, everything: bool) -> None:
    """End the command unless exactly one of an id and --all was given."""
    if (letter_id is None) != everything:
        leave(f"name one dead letter by its id, or --all; see `carpool dlq {command} --help`", EXIT_BAD_OPTION)


def shortened(value: Any) -> Any:
    """The value with the beginnings of its long texts: of an image, say."""
    if isinstance(value, dict):
        return {name: shortened(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shortened(part) for part in value]
    if isinstance(value, str) and len(value) > SHOWN_CHARS_MAX:
        return f"{value[:80]}… ({len(value)} characters; --json shows all)"
    return value


def printable(text: str) -> str:
    """The text without what could drive a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_json(value: Any) -> None:
    """JSON for programs, in ASCII."""
    typer.echo(json_module.dumps(value, indent=2))


def leave(complaint: str, status: int, command: str = "dlq") -> NoReturn:
    """End the command with one line on stderr."""
    typer.echo(f"carpool {command}: {' '.join(complaint.split())}", err=True)
    raise typer.Exit(status)
