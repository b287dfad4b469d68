"""`carpool serve` and `carpool config`: the commands that take every setting as a flag."""

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from carpool.config import FLAGS, KEYS, Key, dump_toml, load_settings, require_upstream
from carpool.settings import Settings

_PANELS = {
    "gateway": "Listening",
    "upstream": "Upstream",
    "model": "Upstream",
    "batching": "Batching",
    "tasks": "Tasks",
    "log": "Logs",
}
_METAVARS = {
    "gateway.host": "ADDRESS",
    "gateway.admin_host": "ADDRESS",
    "gateway.port": "PORT",
    "gateway.admin_port": "PORT",
    "gateway.tls_cert": "FILE",
    "gateway.tls_key": "FILE",
    "upstream.endpoints": "URL",
    "model": "NAME",
    "upstream.slots": "N",
    "batching.max_batch": "N",
    "batching.max_wait_ms": "MS",
    "tasks.data_dir": "DIR",
}
_SERVE_EPILOG = """\
[bold]Examples[/bold]

  carpool serve --upstream http://127.0.0.1:9000/infer

  carpool serve --upstream 'http://gpu-1:9000-9031/infer' --policy fixed --max-wait-ms 20

  carpool serve --config /etc/carpool.toml --no-journal

Every setting is also a key of carpool.toml and an environment variable, such as CARPOOL_GATEWAY_PORT=8080: \
flags win over the environment, the environment over the file. `carpool config` shows the result.
"""
_CONFIG_EPILOG = """\
[bold]Examples[/bold]

  carpool config > carpool.toml

  CARPOOL_GATEWAY_PORT=8080 carpool config --policy fixed
"""


LoadSettings = Callable[[], Settings]


def register(app: typer.Typer) -> None:
    """Add `serve` and `config` to the command line."""
    app.command(epilog=_SERVE_EPILOG, rich_help_panel="Serving")(with_setting_flags(serve))
    app.command(epilog=_CONFIG_EPILOG, rich_help_panel="Serving")(with_setting_flags(config))


def serve(load: LoadSettings) -> int:
    """Take single requests over HTTP and send them to the upstream in batches.

    SIGTERM drains; SIGHUP reads the configuration again: endpoints, slots and upstream timeouts change while running.
    """

    def load_checked() -> Settings:
        settings = load()
        require_upstream(settings)
        return settings

    settings = load_checked()
    from carpool.app import run  # here, so that the other commands do not wait for the network libraries

    return run(settings, reload=load_checked)


def config(load: LoadSettings) -> int:
    """Print the configuration in effect as TOML, with what each key means.

    Takes the flags of `carpool serve`, reads the same environment and file, and starts nothing.
    """
    sys.stdout.write(dump_toml(load()))
    return 0


def with_setting_flags(command: Callable[[LoadSettings], int]) -> Callable[..., int]:
    """A command whose flags are those of `config.FLAGS`; it gets a function that loads the settings.

    The flags take text, and the loader checks it: a bad value reads the same wherever it came from.
    """
    paths = {path.replace(".", "__"): path for path in FLAGS}

    def loaded(config_file: Path | None, **values: Any) -> int:
        flags = {paths[name]: value or None if isinstance(value, list) else value for name, value in values.items()}
        return command(lambda: load_settings(flags, environ=os.environ, file=config_file))

    parameters = [_parameter(name, KEYS[path]) for name, path in paths.items()]
    parameters.append(_CONFIG_FILE)
    loaded.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    loaded.__name__, loaded.__doc__ = command.__name__, command.__doc__
    return loaded


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


def _parameter(name: str, key: Key) -> inspect.Parameter:
    """The typer parameter of one setting; its help is the setting's own description."""
    value_type = get_args(key.hint)[0]
    is_list, is_flag = get_origin(value_type) is list, value_type is bool
    choices = "|".join(get_args(value_type)) if get_origin(value_type) is Literal else None
    option = typer.Option(
        FLAGS[key.path],
        metavar=None if is_flag else choices or _METAVARS[key.path],
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
