"""`carpool keys`: make API keys, take those that clients have already, list and revoke them.

They are kept where the configuration says: in Redis where there is a broker, else in a file beside the journal. Running
gateways see a change within two seconds. A key is shown once, when it is made; what is kept is its SHA-256. A key that
is taken is read from stdin, never from the command line, which other users of the machine can see.
"""

import json as json_module
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from carpool.cli.dlq import EXIT_FAILED, Config, examples, leave, print_json, print_table
from carpool.core.api_key import KEY_PREFIX, LIMIT_MAX, ApiKey, KeyStoreError, key_fault, owner_fault
from carpool.core.clock import rfc3339
from carpool.core.names import ModeName
from carpool.settings import ConfigError, Settings, broker_address, check_name, configured_keys, load_settings

if TYPE_CHECKING:
    from carpool.admission.key_file import KeyFile
    from carpool.broker.redis.fleet.api_keys import RedisKeyStore

Done = TypeVar("Done")

KEY_RANDOM_BYTES = 32
DIGEST_CHARS_SHOWN = 8
DAY_S = 86400
# More than any key: what is longer is refused.
STDIN_CHARS_MAX = 4096

keys = typer.Typer(
    name="keys",
    no_args_is_help=True,
    help="API keys: create, import, list and revoke them. Running gateways see a change within two seconds.",
    epilog=examples(
        "carpool keys create alice --tier paid --per-minute 600 --burst 50",
        "carpool keys create ci --models small --expires 30 --broker redis://127.0.0.1:6379",
        "carpool keys import old-shop --tier paid < their-key.txt",
        "carpool keys revoke alice",
        then="Give it the configuration of your gateways: that says where keys are kept, and which tiers there are.",
    ),
)

Broker = Annotated[str | None, typer.Option("--broker", metavar="URL", help="As for the gateways: keep keys in Redis.")]
DataDir = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", help="As for the gateway: keep keys beside its journal.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="What the key is called.")]


@keys.command("import", help="Take a key that a client has, of any form from 20 characters on: one line on stdin.")
@keys.command(help="Make a key and print it: the only time that it can be seen. Everything else goes to stderr.")
def create(
    context: typer.Context,
    name: Name,
    owner: Annotated[str, typer.Option(help="Whom its requests count for (default: the name).")] = "",
    tier: Annotated[str, typer.Option(help="The tier's name (default: the lowest).")] = "",
    models: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="A model it may ask for; may be repeated (default: all).")
    ] = None,
    per_minute: Annotated[int | None, typer.Option(min=0, max=LIMIT_MAX, help="As limits.per_minute.")] = None,
    burst: Annotated[int | None, typer.Option(min=1, max=LIMIT_MAX, help="As limits.burst.")] = None,
    concurrent: Annotated[int | None, typer.Option(min=0, max=LIMIT_MAX, help="As limits.concurrent.")] = None,
    default_mode: Annotated[ModeName | None, typer.Option(help="As input.default_mode, for this key.")] = None,
    expires: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, max=36500, help="It is valid for so long.")
    ] = None,
    show_toml: Annotated[
        bool, typer.Option("--show-toml", help="Keep nothing: print the table for the configuration file on stderr.")
    ] = False,
    config: Config = None,
    broker: Broker = None,
    data_dir: DataDir = None,
) -> None:
    """Make a key, or take one that there is."""
    import secrets
    from hashlib import sha256

    settings = _load(config, broker, data_dir)
    is_taken = context.info_name == "import"
    now = time.time()
    secret = _read_key() if is_taken else KEY_PREFIX.decode() + secrets.token_urlsafe(KEY_RANDOM_BYTES)
    key = ApiKey(
        name=name,
        sha256=sha256(secret.encode()).hexdigest(),
        owner=owner,
        tier=tier,
        models=tuple(models or ()),
        per_minute=per_minute,
        burst=burst,
        concurrent=concurrent,
        default_mode=default_mode,
        created=now,
        expires=0.0 if expires is None else now + expires * DAY_S,
    )
    _check(key, settings)
    if is_taken:
        _check_is_new(key, settings)
    if show_toml:
        if expires is not None:
            raise ConfigError("--expires is for keys that are kept by Carpool, not for those of the configuration")
        typer.echo(_table(key), err=True)
    elif not _do(lambda: _store(settings).create(key)):
        leave(f"there is a key called {name}; revoke it first, or choose another name", EXIT_FAILED, "keys")
    if not is_taken:
        typer.echo(secret)


@keys.command("list")
def list_keys(
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    config: Config = None,
    broker: Broker = None,
    data_dir: DataDir = None,
) -> None:
    """List the keys: whose they are and what they let them do. The keys themselves are nowhere."""
    settings = _load(config, broker, data_dir)
    rows = [_row(key, "kept") for key in _do(_store(settings).all)]
    rows += [_row(key, "configuration") for key in configured_keys(settings)]
    if json:
        print_json({"keys": rows})
    else:
        print_table(list(rows[0]) if rows else (), [row.values() for row in rows], "no keys")


@keys.command()
def revoke(name: Name, config: Config = None, broker: Broker = None, data_dir: DataDir = None) -> None:
    """Revoke a key: gateways refuse it within two seconds."""
    settings = _load(config, broker, data_dir)
    if name in settings.keys:
        says = f"{name} is a key of the configuration file: remove its table there, and send the gateways a SIGHUP"
        leave(says, EXIT_FAILED, "keys")
    if not _do(lambda: _store(settings).revoke(name)):
        leave(f"there is no key called {name}; see `carpool keys list`", EXIT_FAILED, "keys")
    typer.echo(f"{name} is revoked", err=True)


def _read_key() -> str:
    """The key on stdin; raises ConfigError, which does not show it."""
    on_terminal = sys.stdin.isatty()
    given = typer.prompt("key", hide_input=True, err=True) if on_terminal else sys.stdin.read(STDIN_CHARS_MAX)
    secret: str = given.strip()
    if fault := key_fault(secret):
        raise ConfigError(f"the key on stdin {fault}")
    return secret


def _check_is_new(key: ApiKey, settings: Settings) -> None:
    """Refuse a key that is known by another name: its tier and limits would be ambiguous."""
    for known in (*configured_keys(settings), *_do(_store(settings).all)):
        if known.sha256 == key.sha256:
            leave(f"the key on stdin is there already: it is called {known.name}", EXIT_FAILED, "keys")


def _load(config: Path | None, broker: str | None, data_dir: str | None) -> Settings:
    return load_settings({"broker.url": broker, "tasks.data_dir": data_dir}, environ=os.environ, file=config)


def _check(key: ApiKey, settings: Settings) -> None:
    """Raise ConfigError where a key cannot be as it is asked for."""
    check_name(key.name, "NAME")
    if key.name in settings.keys:
        raise ConfigError(f"there is a key called {key.name} in the configuration file")
    if fault := owner_fault(key.counts_for):
        raise ConfigError(f"the owner {fault}; see --owner")
    tiers = [tier.name for tier in settings.tiers]
    if key.tier and key.tier not in tiers:
        raise ConfigError(f"--tier must be one of {', '.join(tiers)}")
    for model in key.models:
        check_name(model, "--models")


def _store(settings: Settings) -> "RedisKeyStore | KeyFile":
    # Here, so that the other commands do not pay for it.
    if settings.broker.url:
        from carpool.broker.redis.fleet.api_keys import RedisKeyStore
        from carpool.broker.redis.keys import Keys

        at = settings.broker
        return RedisKeyStore(broker_address(at), Keys(at.namespace), at.redis_timeout_ms / 1000)
    from carpool.admission.key_file import FILE_NAME, KeyFile

    return KeyFile(Path(settings.tasks.data_dir) / FILE_NAME)


def _do(work: Callable[[], Done]) -> Done:
    try:
        return work()
    except KeyStoreError as failure:
        leave(str(failure), EXIT_FAILED, "keys")


def _row(key: ApiKey, where: str) -> dict[str, str]:
    return {
        "name": key.name,
        "owner": key.counts_for,
        "tier": key.tier or "(lowest)",
        "models": " ".join(key.models) or "(all)",
        "created": rfc3339(key.created) if key.created else "",
        "expires": rfc3339(key.expires) if key.expires else "",
        "sha256": key.sha256[:DIGEST_CHARS_SHOWN],
        "where": where,
    }


def _table(key: ApiKey) -> str:
    said: dict[str, object] = {"sha256": key.sha256, "owner": key.owner, "tier": key.tier, "models": list(key.models)}
    said |= {"per_minute": key.per_minute, "burst": key.burst, "concurrent": key.concurrent}
    said |= {"default_mode": key.default_mode}
    lines = [f"{name} = {json_module.dumps(value)}" for name, value in said.items() if value not in (None, "", [])]
    return "\n".join([f"[keys.{json_module.dumps(key.name)}]", *lines])
