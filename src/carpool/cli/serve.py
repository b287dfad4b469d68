"""`carpool serve`, `gateway`, `batcher` and `config`: the commands that take every setting as a flag."""

import sys

import typer

from carpool.cli.flags import Given, LoadSettings, with_role_flags, with_setting_flags
from carpool.core.names import Role
from carpool.settings import ConfigError, Settings, admin_port, dump_toml, require_for, warnings_of

_ABOUT_SETTINGS = """\
Every setting is also a key of carpool.toml and an environment variable, such as CARPOOL_GATEWAY_PORT=8080: \
flags win over the environment, the environment over the file. `carpool config` shows the result.
"""
_ABOUT_PASSWORDS = """\
Others on this machine can read a command line: a password for Redis is better in CARPOOL_BROKER_URL, or in a file \
that broker.password_file names.
"""
_SERVE_EPILOG = f"""\
[bold]Examples[/bold]

  carpool serve --upstream http://127.0.0.1:9000/infer

  carpool serve --upstream 'http://gpu-1:9000-9031/infer' --policy fixed --max-wait-ms 20

  carpool serve --config /etc/carpool.toml --no-journal

  carpool serve --broker redis://10.0.0.5:6379 --upstream http://127.0.0.1:9000-9031/infer --processes 4

{_ABOUT_SETTINGS}"""
_GATEWAY_EPILOG = f"""\
[bold]Examples[/bold]

  carpool gateway --broker redis://127.0.0.1:6379

  carpool gateway --broker redis+cluster://10.0.0.5:7000,10.0.0.6:7000 --host 0.0.0.0 --processes 4

  carpool gateway --broker redis://127.0.0.1:6379 --upstream http://gpu-1:9000-9031/infer

{_ABOUT_PASSWORDS}
{_ABOUT_SETTINGS}"""
_BATCHER_EPILOG = f"""\
[bold]Examples[/bold]

  carpool batcher --broker redis://127.0.0.1:6379 --upstream http://127.0.0.1:9000-9031/infer

  carpool batcher --broker redis+sentinel://10.0.0.5:26379,10.0.0.6:26379/carpool --upstream http://gpu-1:9000/infer

  carpool batcher --broker redis://127.0.0.1:6379 --upstream http://gpu-2:9000/infer --admin-port 8003

{_ABOUT_PASSWORDS}
{_ABOUT_SETTINGS}"""
_CONFIG_EPILOG = """\
[bold]Examples[/bold]

  carpool config > carpool.toml

  CARPOOL_GATEWAY_PORT=8080 carpool config --policy fixed
"""


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog=_SERVE_EPILOG, rich_help_panel="Serving")(with_role_flags(serve))
    app.command(epilog=_GATEWAY_EPILOG, rich_help_panel="Serving")(with_role_flags(gateway))
    app.command(epilog=_BATCHER_EPILOG, rich_help_panel="Serving")(with_role_flags(batcher))
    app.command(epilog=_CONFIG_EPILOG, rich_help_panel="Serving")(with_setting_flags(config))


def serve(given: Given, listen_fd: int | None) -> int:
    """Take single requests over HTTP and send them to the upstream in batches.

    Alone it needs nothing else. With --broker it is a gateway and a batcher among others that meet in one Redis.

    SIGTERM drains; SIGHUP reads the configuration again: endpoints, slots and upstream timeouts change while running.
    """
    return _run("serve", given, listen_fd)


def gateway(given: Given, listen_fd: int | None) -> int:
    """Take single requests over HTTP and queue them in Redis, for the batchers; any gateway can tell a task's result.

    With --upstream it calls the endpoints itself while Redis is gone (direct mode); without, clients get a 503 then.

    SIGTERM drains; SIGHUP reads the configuration again.
    """
    return _run("gateway", given, listen_fd)


def batcher(given: Given, listen_fd: int | None) -> int:
    """Take requests from Redis when an endpoint has a free slot, and send them in batches.

    An endpoint belongs to one batcher: two that share it each take it for theirs, with all its slots.

    SIGTERM drains; SIGHUP reads the configuration again: endpoints, slots and upstream timeouts change while running.
    """
    return _run("batcher", given, listen_fd)


def config(load: LoadSettings) -> int:
    """Print the configuration in effect as TOML, with what each key means.

    Takes the flags of `carpool serve`, reads the same environment and file, and starts nothing.
    """
    settings = load()
    sys.stdout.write(dump_toml(settings))
    for warning in warnings_of(settings):
        print(f"carpool: warning: {warning}", file=sys.stderr)  # noqa: T201 - beside the TOML
    return 0


def _run(role: Role, given: Given, listen_fd: int | None) -> int:
    def load_checked() -> Settings:
        settings = given.load()
        require_for(role, settings)
        return settings

    if role == "batcher" and given.flags["gateway.processes"] is not None:
        raise ConfigError("gateway.processes (flag --processes) is for gateways: start another `carpool batcher`")
    settings = load_checked()
    if listen_fd is None and role != "batcher" and settings.gateway.processes > 1:
        return _run_processes(role, given, settings)
    listen = None
    if listen_fd is not None:
        from carpool.processes import adopt

        try:
            listen = adopt(listen_fd)
        except OSError:
            raise ConfigError("--listen-fd is for the processes that --processes starts") from None
    from carpool.app import run  # here, so that the other commands do not wait for the network libraries

    return run(settings, reload=load_checked, role=role, listen=listen)


def _run_processes(role: Role, given: Given, settings: Settings) -> int:
    """Be the parent of `gateway.processes` processes."""
    from carpool.processes import Processes, listen_on
    from carpool.telemetry.logs import configure_logging

    host, port = settings.gateway.host, settings.gateway.port
    try:
        listener = listen_on(host, port)
    except OSError as failure:
        raise ConfigError(f"cannot serve on {host}:{port}: {failure.strerror or failure}") from None
    first_admin_port = admin_port(settings.gateway)

    def command(number: int) -> list[str]:
        # The endpoints' slots are there once: one process is their batcher, all are gateways.
        name = role if number == 0 else "gateway"
        flags = given.command_line(gateway__admin_port=first_admin_port + number if first_admin_port else 0)
        return [sys.executable, "-m", "carpool", name, *flags, f"--listen-fd={listener.fileno()}"]

    configure_logging(settings.log.level, settings.log.format)
    return Processes(command, settings.gateway.processes, listener).run()
