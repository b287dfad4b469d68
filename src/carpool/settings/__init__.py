"""The configuration: what there is to set (`schema.py`), how it is read, and what each model makes of it."""

from carpool.settings.checks import check_name, require_broker, require_for, require_upstream, warnings_of
from carpool.settings.errors import ConfigError
from carpool.settings.loading import dump_toml, load_settings
from carpool.settings.resolution import (
    Model,
    admin_port,
    broker_address,
    configured_keys,
    is_loopback,
    models_of,
    total_timeout_s,
)
from carpool.settings.schema import Settings

__all__ = [
    "ConfigError",
    "Model",
    "Settings",
    "admin_port",
    "broker_address",
    "check_name",
    "configured_keys",
    "dump_toml",
    "is_loopback",
    "load_settings",
    "models_of",
    "require_broker",
    "require_for",
    "require_upstream",
    "total_timeout_s",
    "warnings_of",
]
