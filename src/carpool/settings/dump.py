"""The configuration in effect as TOML that loads back. What may be secret is left out."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from carpool.settings.keys import MODEL_SUMMARY, ROOT_KEYS, SECTIONS, Key, model_keys, section_keys, summary
from carpool.settings.resolution import admin_port, total_timeout_s
from carpool.settings.schema import KeySettings, Settings, TierSettings

_BARE_TOML_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(settings: Settings) -> str:
    """The whole configuration as commented TOML that loads back to the same settings, secrets left out."""
    lines: list[str] = []
    # What is in effect of that which is not set.
    derived: dict[str, Any] = {
        "gateway.admin_port": admin_port(settings.gateway),
        "broker.total_timeout_s": total_timeout_s(settings),
    }
    for key in ROOT_KEYS:
        lines += _dump_key(key, getattr(settings, key.name))
    for name, cls in SECTIONS.items():
        lines += ["", f"# {summary(cls)}", f"[{name}]"]
        for key in section_keys(cls, f"{name}."):
            lines += _dump_key(key, getattr(getattr(settings, name), key.name), derived.get(key.path))
    lines += ["", f"# {summary(TierSettings)}"]
    for tier in settings.tiers:
        said = msgspec.structs.asdict(tier).items()
        lines += ["[[tiers]]", *(f"{k} = {_toml(v)}" for k, v in said if v is not None)]
    lines += ["", f"# {MODEL_SUMMARY}"]
    for name, model in settings.models.items():
        lines += _dump_named("models", name, model_keys(""), model)
    lines += ["", f"# {summary(KeySettings)}"]
    for name, api_key in settings.keys.items():
        lines += _dump_named("keys", name, section_keys(KeySettings, ""), msgspec.structs.asdict(api_key))
    return "\n".join(lines) + "\n"


def changes_toml(changes: Mapping[str, Any]) -> str:
    """Settings by their paths, each under its table."""
    tables: dict[str, list[str]] = {}
    for path, value in changes.items():
        table, _, key = path.rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {_toml(value)}")
    parts = ["\n".join(tables.pop("", []))]
    for table, lines in tables.items():
        section, _, name = table.partition(".")
        parts.append("\n".join([f"[{section}.{_toml_key(name)}]" if name else f"[{section}]", *lines]))
    return "\n\n".join(filter(None, parts))


def _dump_named(table: str, name: str, keys: list[Key], said: Mapping[str, Any]) -> list[str]:
    """A table that has a name; what it leaves open is left out."""
    lines = [f"[{table}.{_toml_key(name)}]"]
    for key in keys:
        if (value := said.get(key.name)) is not None:
            lines += _dump_url(key, value) if key.is_url else [f"{key.name} = {_toml(value)}"]
    return lines


def _dump_key(key: Key, value: Any, derived: Any = None) -> list[str]:
    if key.is_secret:
        line = f'# {key.name} = "***"' if value else f'# {key.name} = ""'
        return [f"# {key.description}; set it with {key.variable}", line]
    if key.is_url:
        return [f"# {key.description}", *_dump_url(key, value)]
    if value is None:
        return [f"# {key.description}", f"# {key.name} =" + ("" if derived is None else f" {_toml(derived)}")]
    return [f"# {key.description}", f"{key.name} = {_toml(value)}"]


def _dump_url(key: Key, value: Any) -> list[str]:
    """One URL or several; a comment if something had to be left out, for then it would not load back."""
    hidden = [without_secrets(url) for url in value] if isinstance(value, list) else without_secrets(value)
    if hidden == value:
        return [f"{key.name} = {_toml(value)}"]
    return ["# (*** stands for what may be secret)", f"# {key.name} = {_toml(hidden)}"]


def without_secrets(url: str) -> str:
    """A valid URL without its password and its query string."""
    if url.startswith("sim:"):
        return url
    start = ""
    if url.startswith(("redis", "postgres")):
        scheme, _, rest = url.partition("://")
        user_info, at, url = rest.rpartition("@")
        user, colon, _ = user_info.partition(":")
        start = f"{scheme}://" + (f"{user}:***@" if colon else "***@" if at else "")
    address, _, query = url.partition("?")
    return start + address + ("?***" if query else "")


def _toml_key(name: str) -> str:
    return name if _BARE_TOML_KEY.fullmatch(name) else _toml(name)


def _toml(value: Any) -> str:
    # JSON writes text, numbers, booleans and lists of these as TOML does; control characters never get here.
    return json.dumps(value, ensure_ascii=False)
