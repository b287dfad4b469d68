"""Every setting that has a flag, as an option of a command; and the flags of a command line written out again."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer

from carpool.settings import Settings, load_settings
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
_METAVARS = {
    "gateway.host": "ADDRESS",
    "gateway.admin_host": "ADDRESS",
    "gateway.port": "PORT",
    "gateway.admin_port": "PORT",
    "gateway.grpc_port": "PORT",
    "gateway.tls_cert": "FILE",
    "gateway.tls_key": "FILE",
    "gateway.processes": "N",
    "broker.url": "URL",
    "upstream.endpoints": "URL",
    "model": "NAME",
    "upstream.slots": "N",
    "batching.max_batch": "N",
    "batching.max_wait_ms": "MS",
    "tasks.data_dir": "DIR",
}

LoadSettings = Callable[[], Settings]


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


def with_setting_flags(command: Callable[[LoadSettings], int]) -> Callable[..., int]:
    """A command whose flags are those of `keys.FLAGS`; it gets a function that loads the settings."""
    return _with_flags(command, lambda given: command(given.load), ())


def with_role_flags(command: Callable[[Given, int | None], int]) -> Callable[..., int]:
    """A command that serves: it gets what the command line says, and the socket that its parent listens on."""
    return _with_flags(command, lambda given, listen_fd: command(given, listen_fd), (_LISTEN_FD,))


def _with_flags(
    documented: Callable[..., int], command: Callable[..., int], further: Sequence[inspect.Parameter]
) -> Callable[..., int]:
    """The flags take text, and the loader checks it: a bad value reads the same wherever it came from."""
    paths = {path.replace(".", "__"): path for path in FLAGS}
    further_names = [parameter.name for parameter in further]

    def parsed(config_file: Path | None, **values: Any) -> int:
        others = [values.pop(name) for name in further_names]
        flags = {paths[name]: value or None if isinstance(value, list) else value for name, value in values.items()}
        return command(Given(flags, config_file), *others)

    parameters = [_parameter(name, KEYS[path]) for name, path in paths.items()]
    parameters += [_CONFIG_FILE, *further]
    parsed.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    parsed.__name__, parsed.__doc__ = documented.__name__, documented.__doc__
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
