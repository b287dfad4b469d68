"""`carpool serve`, `gateway`, `batcher` and `config`: the commands that take every setting that has a flag."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer

from carpool.cli.dlq import examples
from carpool.core.names import Role
from carpool.settings import ConfigError, Settings, admin_port, dump_toml, load_settings, require_for, warnings_of
from carpool.settings.keys import FLAGS, KEYS, Key

_PANELS = {
    "gateway": "Listening",
    "upstream": "Upstream",
    "model": "Upstream",
    "broker": "Broker",
    "batching": "Batching",
    "tasks": "Tasks",
    "log": "Logs",
}
_ABOUT_SETTINGS = """\
Every setting is also a key of carpool.toml and an environment variable, such as CARPOOL_GATEWAY_PORT=8080: \
flags win over the environment, the environment over the file. `carpool config` shows the result.
"""
_ABOUT_PASSWORDS = """\
Others on this machine can read a command line: a password for Redis is better in CARPOOL_BROKER_URL, or in a file \
that broker.password_file names.
"""
_SERVE_EPILOG = examples(
    "carpool serve --upstream http://127.0.0.1:9000/infer",
    "carpool serve --upstream 'http://gpu-1:9000-9031/infer' --policy fixed --max-wait-ms 20",
    "carpool serve --config /etc/carpool.toml --no-journal",
    "carpool serve --broker redis://10.0.0.5:6379 --upstream http://127.0.0.1:9000-9031/infer --processes 4",
    then=_ABOUT_SETTINGS,
)
_GATEWAY_EPILOG = examples(
    "carpool gateway --broker redis://127.0.0.1:6379",
    "carpool gateway --broker redis+cluster://10.0.0.5:7000,10.0.0.6:7000 --host 0.0.0.0 --processes 4",
    "carpool gateway --broker redis://127.0.0.1:6379 --upstream http://gpu-1:9000-9031/infer",
    then=(_ABOUT_PASSWORDS + "\n\n" + _ABOUT_SETTINGS),
)
_BATCHER_EPILOG = examples(
    "carpool batcher --broker redis://127.0.0.1:6379 --upstream http://127.0.0.1:9000-9031/infer",
    "carpool batcher --broker redis+sentinel://10.0.0.5:26379,10.0.0.6:26379/carpool --upstream http://gpu-1:9000/infer",
    "carpool batcher --broker redis://127.0.0.1:6379 --upstream http://gpu-2:9000/infer --admin-port 8003",
    then=(_ABOUT_PASSWORDS + "\n\n" + _ABOUT_SETTINGS),
)
_CONFIG_EPILOG = examples(
    "carpool config > carpool.toml",
    "CARPOOL_GATEWAY_PORT=8080 carpool config --policy fixed",
)


class Given(NamedTuple):
    """What the command line says: the flags by the key they set, and the file."""

    flags: Mapping[str, Any]
    config_file: Path | None

    def load(self) -> Settings:
        """The settings in effect now; raises ConfigError."""
        return load_settings(self.flags, environ=os.environ, file=self.config_file)

    def command_line(self, **replaced: Any) -> list[str]:
        """These flags again; `replaced` are other values, by path with `__` for the dot."""
        flags = {**self.flags, **{name.replace("__", "."): value for name, value in replaced.items()}}
        words: list[str] = [] if self.config_file is None else ["--config", str(self.config_file)]
        for path, value in flags.items():
            if isinstance(value, bool):
                on, _, off = FLAGS[path].partition("/")
                words.append(on if value else off)
            elif value is not None:
                # Each in one word: a value may begin with a dash.
                words += [f"{FLAGS[path]}={each}" for each in (value if isinstance(value, list) else [value])]
        return words


def with_setting_flags(command: Callable[[Given, int | None], int]) -> Callable[..., int]:
    """A command with the flags of `keys.FLAGS`: it gets what the command line says, and its parent's listening socket.

    The flags take text, and the loader checks it: a bad value reads the same wherever it came from.
    """
    paths = {path.replace(".", "__"): path for path in FLAGS}

    def parsed(config_file: Path | None, listen_fd: int | None, **values: Any) -> int:
        flags = {paths[name]: value or None if isinstance(value, list) else value for name, value in values.items()}
        return command(Given(flags, config_file), listen_fd)

    parameters = [_parameter(name, KEYS[path]) for name, path in paths.items()]
    parameters += [_CONFIG_FILE, _LISTEN_FD]
    parsed.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    parsed.__name__, parsed.__doc__ = command.__name__, command.__doc__
    return parsed


_CONFIG_FILE = inspect.Parameter(
    "config_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="the configuration file; also CARPOOL_CONFIG (default carpool.toml, if there is one)",
            rich_help_panel="Configuration",
        ),
    ],
)
_LISTEN_FD = inspect.Parameter(
    "listen_fd",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        int | None,
        typer.Option(
            "--listen-fd", hidden=True, min=0, help="Serve on this inherited socket, and leave when stdin ends."
        ),
    ],
)


def _parameter(name: str, key: Key) -> inspect.Parameter:
    """The typer parameter of one setting; its help is the setting's own description."""
    value_type = get_args(key.hint)[0]
    is_list, is_flag = get_origin(value_type) is list, value_type is bool
    choices = "|".join(get_args(value_type)) if get_origin(value_type) is Literal else None
    option = typer.Option(
        FLAGS[key.path],
        metavar=None if is_flag else choices or key.path.rpartition(".")[2].upper(),
        help=key.description + ("; may be repeated" if is_list else "") + _default_text(key),
        rich_help_panel=_PANELS[key.path.partition(".")[0]],
    )
    python_type: Any = bool if is_flag else list[str] if is_list else str
    annotation = Annotated[python_type | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default_text(key: Key) -> str:
    if key.default is None or key.default in ("", []):
        return ""
    if isinstance(key.default, bool):
        return f" (default {'on' if key.default else 'off'})"
    return f" (default {key.default:g})" if isinstance(key.default, float) else f" (default {key.default})"


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(epilog=_SERVE_EPILOG, rich_help_panel="Serving")(with_setting_flags(serve))
    app.command(epilog=_GATEWAY_EPILOG, rich_help_panel="Serving")(with_setting_flags(gateway))
    app.command(epilog=_BATCHER_EPILOG, rich_help_panel="Serving")(with_setting_flags(batcher))
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


def config(given: Given, _: int | None) -> int:
    """Print the configuration in effect as TOML, with what each key means.

    Takes the flags of `carpool serve`, reads the same environment and file, and starts nothing.
    """
    settings = given.load()
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
