"""`carpool dlq` (look at dead letters, replay or drop them) and `carpool webhooks` (look at what waits, send it).

The journal belongs to the running gateway, so this asks its admin port. A dead letter holds what clients sent:
nothing of it reaches the terminal but characters that can be printed.
"""

import json as json_module
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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


def examples(*commands: str, then: str = "") -> str:
    """The end of a command's help."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  {command}" for command in commands), then])


dlq = typer.Typer(
    name="dlq",
    no_args_is_help=True,
    help="Dead letters: requests given up on. List, show, replay or drop them.",
    epilog=examples(
        "carpool dlq list",
        "carpool dlq show 17",
        "carpool dlq replay --all --cause upstream-failed",
    ),
)

Admin = Annotated[str, typer.Option(metavar="URL", help="The gateway's admin port.")]
Token = Annotated[
    str,
    typer.Option(metavar="TOKEN", envvar="CARPOOL_SERVICE_TOKEN", help="A service token, if it asks for one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The gateways' configuration file; also CARPOOL_CONFIG."),
]
LetterId = Annotated[int, typer.Argument(metavar="ID", min=1, help="The number that `list` shows.")]
SomeLetterId = Annotated[int | None, typer.Argument(metavar="ID", min=1, help="The number that `list` shows.")]
Everything = Annotated[bool, typer.Option("--all", help="All there are now.")]

ONE_OR_ALL = "name one dead letter by its id, or --all; see"
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
    names = ("id", "buried_at", "model", "cause", "sends", "size", "detail")
    columns = ("id", "buried at", "model", "cause", "sends", "bytes", "detail")
    print_table(columns, [[letter[name] for name in names] for letter in letters], "no dead letters")
    if total > len(letters):
        typer.echo(f"{len(letters)} of {total}; see --limit and --after {letters[-1]['id']}")


@dlq.command()
def show(letter_id: LetterId, admin: Admin = DEFAULT_ADMIN, token: Token = "", json: Json = False) -> None:
    """Show one dead letter with its input and parameters."""
    letter = Gateway(admin, token).ask("GET", f"/internal/dead-letters/{letter_id}")
    if json:
        print_json(letter)
        return
    rows = []
    for name, value in letter.items():
        is_text = isinstance(value, str) and name not in ("input", "parameters")
        shown = value if is_text else json_module.dumps(shortened(value), ensure_ascii=False, indent=2)
        rows.append((name.replace("_", " "), shown))
    print_table((), rows)


@dlq.command()
def replay(
    letter_id: SomeLetterId = None,
    everything: Everything = False,
    cause: Annotated[str, typer.Option(metavar="CODE", help="With --all: only those of this cause.")] = "",
    admin: Admin = DEFAULT_ADMIN,
    token: Token = "",
    json: Json = False,
) -> None:
    """Make dead letters tasks again. Each becomes a new task with an id of its own, and leaves the list."""
    if (letter_id is None) != everything:
        leave(f"{ONE_OR_ALL} `carpool dlq replay --help`", EXIT_BAD_OPTION)
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
    everything: Everything = False,
    admin: Admin = DEFAULT_ADMIN,
    token: Token = "",
    json: Json = False,
) -> None:
    """Remove dead letters for good."""
    if (letter_id is None) != everything:
        leave(f"{ONE_OR_ALL} `carpool dlq drop --help`", EXIT_BAD_OPTION)
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


webhooks = typer.Typer(
    name="webhooks",
    no_args_is_help=True,
    help="Webhooks: outcomes of tasks that wait to be sent. List them, or send them now.",
    epilog=examples(
        "carpool webhooks list",
        "carpool webhooks retry 5f2b8c0d9e7a41b6a3c4d5e6f7081920",
        "carpool webhooks retry --all",
    ),
)


@webhooks.command("list")
def list_webhooks(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 100,
    admin: Admin = DEFAULT_ADMIN,
    token: Token = "",
    json: Json = False,
) -> None:
    """List webhooks that wait, the next first, without what they carry."""
    answer: dict[str, Any] = Gateway(admin, token, "webhooks").ask("GET", f"/internal/webhooks?limit={limit}")
    if json:
        print_json(answer)
        return
    found = answer["webhooks"]
    names = ("task_id", "due_in_s", "age_s", "attempts", "size", "failure", "url")
    columns = ("task", "due in s", "age s", "attempts", "bytes", "last failure", "url")
    print_table(columns, [[webhook[name] for name in names] for webhook in found], "no webhooks wait")
    if answer["total"] > len(found):
        typer.echo(f"{len(found)} of {answer['total']}; see --limit")


@webhooks.command()
def retry(
    task_id: Annotated[str | None, typer.Argument(metavar="TASK", help="The id that `list` shows.")] = None,
    everything: Everything = False,
    admin: Admin = DEFAULT_ADMIN,
    token: Token = "",
    json: Json = False,
) -> None:
    """Send webhooks now that wait to be sent again. What was delivered or given up is gone."""
    if (task_id is None) != everything:
        leave("name one by its task, or --all; see `carpool webhooks retry --help`", EXIT_BAD_OPTION, "webhooks")
    if task_id is not None and not task_id.isalnum():
        leave("this is not the id of a task", EXIT_BAD_OPTION, "webhooks")
    target = "/internal/webhooks/retry" if task_id is None else f"/internal/webhooks/{task_id}/retry"
    answer = Gateway(admin, token, "webhooks").ask("POST", target)
    if json:
        print_json(answer)
    else:
        typer.echo(f"{answer['retried']} to be sent now")


class Gateway:
    """The admin port of a running gateway. No proxy and no redirect is followed: the token goes nowhere else."""

    def __init__(self, url: str, token: str, command: str = "dlq") -> None:
        # The command that error lines name.
        self._command = command
        try:
            parts = urlsplit(url)
            self._port = parts.port
        except ValueError:
            parts = urlsplit("")
        token = next((each.strip() for each in token.split(",") if each.strip()), "")  # of several, the newest is first
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            leave(f"--admin {printable(url)} is not a URL such as {DEFAULT_ADMIN}", EXIT_BAD_OPTION, self._command)
        if not (token.isascii() and token.isprintable()):
            leave("the token has characters that no token has", EXIT_BAD_OPTION, self._command)
        self._url = url
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(self, method: str, target: str, *, may_miss: bool = False) -> Any:
        """The gateway's JSON answer; any other answer ends the command with one line. None: there is nothing."""
        with self._connected() as connection:
            connection.sock.settimeout(ANSWER_S_MAX)
            connection.request(method, target, headers=self._headers)
            response = connection.getresponse()
            status, body = response.status, response.read()
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
        says = f"what answers at {self._url} is not the admin port of a gateway; see --admin"
        leave(says, EXIT_FAILED, self._command)


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


def print_table(columns: Sequence[str], rows: Iterable[Iterable[object]], if_empty: str = "") -> None:
    """A table for people, with a heading where there are `columns`; to a file or a pipe in whole lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, show_header=bool(columns), box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    if not table.row_count and if_empty:
        typer.echo(if_empty)
        return
    console = Console()
    if not console.is_terminal:
        console.width = 1000
    console.print(table)


def print_json(value: Any) -> None:
    """JSON for programs, in ASCII."""
    typer.echo(json_module.dumps(value, indent=2))


def leave(complaint: str, status: int, command: str = "dlq") -> NoReturn:
    """End the command with one line on stderr."""
    typer.echo(f"carpool {command}: {printable(' '.join(complaint.split()))}", err=True)
    raise typer.Exit(status)
