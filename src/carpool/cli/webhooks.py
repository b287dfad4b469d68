"""`carpool webhooks`: look at those that wait, and let them be sent now. It asks a gateway's admin port."""

from typing import Annotated, Any

import typer

from carpool.cli.dlq import DEFAULT_ADMIN, EXIT_BAD_OPTION, Admin, Gateway, Json, Token, leave, print_json, printable

webhooks = typer.Typer(
    name="webhooks",
    no_args_is_help=True,
    help="Webhooks: outcomes of tasks that wait to be sent. List them, or send them now.",
    epilog="""\
[bold]Examples[/bold]

  carpool webhooks list

  carpool webhooks retry 5f2b8c0d9e7a41b6a3c4d5e6f7081920

  carpool webhooks retry --all
""",
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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not answer["webhooks"]:
        typer.echo("no webhooks wait")
        return
    table = Table(
        "task", "due in s", "age s", "attempts", "bytes", "last failure", "url", box=None, header_style="bold"
    )
    for webhook in answer["webhooks"]:
        names = ("task_id", "due_in_s", "age_s", "attempts", "size", "failure", "url")
        table.add_row(*(Text(printable(str(webhook[name]))) for name in names))
    Console().print(table)
    if answer["total"] > len(answer["webhooks"]):
        typer.echo(f"{len(answer['webhooks'])} of {answer['total']}; see --limit")


@webhooks.command()
def retry(
    task_id: Annotated[str | None, typer.Argument(metavar="TASK", help="The id that `list` shows.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that wait.")] = False,
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
