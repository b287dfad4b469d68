"""What no single key can tell: whether the settings go together, and whether the files that they name can be used."""

import re
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec

import msgspec

from carpool.admission.input_policy import compile_patterns
from carpool.admission.owners import parse_network
from carpool.core.api_key import owner_fault
from carpool.core.names import Role, TlsFiles
from carpool.settings.errors import ConfigError, faults_at, shown
from carpool.settings.resolution import (
    Where,
    admin_port,
    broker_address,
    call_timeouts_s,
    is_loopback,
    models_of,
    path_of,
    read_password,
    resolve,
    tls_files,
    total_timeout_s,
)
from carpool.settings.schema import (
    NAME_PATTERN,
    NAME_WORDS,
    BrokerSettings,
    GatewaySettings,
    ModelSettings,
    Settings,
    UpstreamSettings,
    WebhookSettings,
)
from carpool.upstream.load import parse_load_source
from carpool.upstream.tls import UpstreamSecurity, read_file, read_header_value, read_token


def require_upstream(settings: Settings) -> None:
    """Raise ConfigError unless every model has an endpoint to call."""
    for name, model in models_of(settings).items():
        if model.upstream.endpoints:
            continue
        if name in settings.models and "endpoints" in settings.models[name]:
            raise ConfigError(f"models.{name}.endpoints is empty: name at least one endpoint, or leave it out")
        raise ConfigError("no upstream: give --upstream URL (or upstream.endpoints), or try `carpool demo`")


def require_broker(settings: Settings) -> None:
    """Raise ConfigError unless there is a Redis to meet at."""
    if not settings.broker.url:
        raise ConfigError(
            "no broker: give --broker redis://HOST:6379 (or broker.url); "
            "without Redis, `carpool serve` does everything in one process"
        )


def require_for(role: Role, settings: Settings) -> None:
    """Raise ConfigError unless there is what the role needs. A gateway needs upstreams for direct mode alone."""
    if role != "serve":
        require_broker(settings)
    if role != "gateway":
        require_upstream(settings)


def check_together(settings: Settings, where: Where) -> None:
    """Raise ConfigError where the settings do not go together, or a file cannot be used."""
    if settings.models and settings.model not in settings.models:
        raise ConfigError(f"{where('model')} must be one of the configured: {', '.join(settings.models)}")
    if not settings.tasks.data_dir and (settings.tasks.journal or settings.tracking.store == "sqlite"):
        why = "tasks.journal is true" if settings.tasks.journal else "tracking.store is sqlite"
        raise ConfigError(f"{where('tasks.data_dir')} must name a directory while {why}")
    if not settings.service.token and not is_loopback(settings.gateway.admin_host):
        raise ConfigError(
            f"{where('gateway.admin_host')} is not loopback: that needs service.token "
            "(CARPOOL_SERVICE_TOKEN), which callers of the admin port must then send"
        )
    _check_gateway(settings.gateway, where)
    _check_keys(settings, where)
    _check_tokens(settings, where)
    _check_broker(settings.broker, where)
    _check_tracking(settings, where)
    _check_processes(settings, where)
    _check_models(settings, where)
    _check_webhooks(settings.webhooks, where)


def warnings_of(settings: Settings) -> list[str]:
    """Warnings about settings that are valid, but hardly intended."""
    total_s, queue_s = total_timeout_s(settings), settings.broker.queue_timeout_s
    is_set = settings.broker.total_timeout_s is not None
    total = f"broker.total_timeout_s ({total_s:g} s{'' if is_set else ', as it is not set'})"
    said = []
    if queue_s >= total_s:
        ends = "a request that waits so long for a slot has no time left for a call"
        said.append(f"broker.queue_timeout_s ({queue_s:g} s) is not below {total}: {ends}")
    for path, timeout_s in call_timeouts_s(settings).items():
        if timeout_s >= total_s:
            ends = "synchronous requests are given up before a call may end"
            said.append(f"{path} ({timeout_s:g} s) is not below {total}: {ends}")
    return said


def check_name(name: str, where: str) -> None:
    """Raise ConfigError unless a name can stand in keys, metrics and URLs."""
    if not re.search(NAME_PATTERN, name):
        raise ConfigError(f"{where} must be {NAME_WORDS}, not {shown(name)}")


def _check_keys(settings: Settings, where: Where) -> None:
    """The API keys of the configuration."""
    tiers = [tier.name for tier in settings.tiers]
    models = settings.models or {settings.model}
    seen: dict[str, str] = {}
    for name, key in settings.keys.items():
        at = f"keys.{name}"
        other = seen.setdefault(key.sha256.lower(), name)
        if other != name:
            raise ConfigError(f"{where(f'{at}.sha256')} is that of keys.{other} too: one key, one table")
        if fault := owner_fault(key.owner or name):
            raise ConfigError(f"{where(f'{at}.owner')} {fault}")
        if key.tier and key.tier not in tiers:
            raise ConfigError(f"{where(f'{at}.tier')} must be one of {', '.join(tiers)}, not {shown(key.tier)}")
        for model in key.models:
            if model not in models:
                raise ConfigError(f"{where(f'{at}.models')} has {shown(model)}, which is not configured")


def _check_tokens(settings: Settings, where: Where) -> None:
    """The keys that sign tokens, read once, so that a fault shows now and not with the first request."""
    auth = settings.auth
    if auth.mode not in ("jwt", "both"):
        return
    if not auth.jwt_file:
        raise ConfigError(f"{where('auth.mode')} needs auth.jwt_file: the keys that sign tokens")
    # Here, so that those without tokens do not wait for its libraries.
    from carpool.admission.tokens import TokenKeys, TokenRules

    with faults_at(f"{where('auth.jwt_file')} must be a file with keys:"):
        TokenKeys(read_file(auth.jwt_file), TokenRules(auth.jwt_algorithms))


def _check_webhooks(webhooks: WebhookSettings, where: Where) -> None:
    if not webhooks.hosts and not webhooks.secrets:
        return
    # Here, so that those without webhooks do not pay for it.
    from carpool.broker.webhooks.rules import allowed_host, secret_of

    for host in webhooks.hosts:
        with faults_at(f"{where('webhooks.hosts')} has {shown(host)}:"):
            allowed_host(host)
    with faults_at(f"{where('webhooks.secrets')}:"):
        for secret in webhooks.secrets:
            secret_of(secret)
    if not webhooks.secrets:
        raise ConfigError(
            f"{where('webhooks.hosts')} needs webhooks.secrets (CARPOOL_WEBHOOKS_SECRETS), so that receivers can tell "
            "whose webhooks these are"
        )


def _check_gateway(gateway: GatewaySettings, where: Where) -> None:
    if gateway.port and gateway.admin_port == gateway.port:
        raise ConfigError(f"{where('gateway.admin_port')} must differ from gateway.port")
    if admin_port(gateway) > 65535:
        raise ConfigError(f"{where('gateway.port')} leaves no port after it: give gateway.admin_port too")
    port, admin = gateway.grpc_port, admin_port(gateway)
    if port is not None:
        _check_extra(where("gateway.grpc_port"))
    if port and (port == gateway.port or (admin and admin <= port < admin + gateway.processes)):
        raise ConfigError(f"{where('gateway.grpc_port')} is the port of another face: give another one")
    for text in gateway.trusted_proxies:
        at = where("gateway.trusted_proxies")
        try:
            network = parse_network(text)
        except ValueError as fault:
            hint = ": the address goes on behind the network's bits" if "host bits" in str(fault) else ""
            like = "addresses or networks like 10.1.2.3 or 10.0.0.0/8"
            raise ConfigError(f"{at} must have {like}, not {shown(text)}{hint}") from None
        if network.prefixlen == 0:
            raise ConfigError(f"{at} has {shown(text)}: if everybody is a proxy, nobody is a client")
    files = TlsFiles("", gateway.tls_cert, gateway.tls_key)
    _check_tls(files, lambda key: where(f"gateway.{key}"))


def _check_extra(place: str) -> None:
    if any(find_spec(name) is None for name in ("grpc", "grpc_reflection")):
        raise ConfigError(f"{place} needs grpcio: pip install 'carpool[grpc]'")


def _check_broker(broker: BrokerSettings, where: Where) -> None:
    """Check the settings of Redis, as far as that is possible without a connection."""

    def at(key: str) -> str:
        return where(f"broker.{key}")

    if not broker.url:
        for name in ("password_file", "tls_ca", "tls_cert", "tls_key"):
            if getattr(broker, name):
                raise ConfigError(f"{at(name)} is of no use without broker.url")
        if broker.persistence == "forbidden":
            says = "is about Redis, and there is no broker.url; tasks.journal = false keeps payloads off the disk"
            raise ConfigError(f"{at('persistence')} {says}")
        return
    if broker.password_file:
        with faults_at(at("password_file")):
            read_password(broker.password_file)
    files = tls_files(broker)
    _check_pair(files, at)
    with faults_at(at("url")):
        broker_address(broker)
    _check_tls(files, at)


def _check_tracking(settings: Settings, where: Where) -> None:
    """Check the store of tracking without connecting to it. Its URL may hold a password."""
    tracking = settings.tracking
    if tracking.store == "postgres":
        if not tracking.url.startswith(("postgresql://", "postgres://")):
            raise ConfigError(f"{where('tracking.url')} must be like postgresql://user@host:5432/database")
        if find_spec("asyncpg") is None:
            raise ConfigError(f"{where('tracking.store')} needs asyncpg: pip install 'carpool[postgres]'")
    elif tracking.url:
        raise ConfigError(f"{where('tracking.url')} is of no use unless tracking.store is postgres")
    if tracking.in_flight and tracking.store == "off":
        raise ConfigError(f"{where('tracking.in_flight')} is of no use while tracking.store is off")


def _check_processes(settings: Settings, where: Where) -> None:
    """Several processes need a place where they meet, and a range of admin ports."""
    gateway = settings.gateway
    if gateway.processes == 1:
        return
    if not settings.broker.url:
        raise ConfigError(f"{where('gateway.processes')} above 1 needs a broker: give --broker URL (or broker.url)")
    first = admin_port(gateway)
    last = first + gateway.processes - 1
    if first and last > 65535:
        raise ConfigError(f"{where('gateway.processes')} needs as many admin ports from {first} on as there are")
    if first and first <= gateway.port <= last:
        raise ConfigError(f"{where('gateway.port')} is one of the admin ports of the processes, {first} to {last}")


def _check_models(settings: Settings, where: Where) -> None:
    """What all models share, and then each with its own word."""
    nothing: ModelSettings = {}
    shared = resolve(settings, settings.model, nothing, where)
    models = [(resolve(settings, name, own, where), own) for name, own in settings.models.items()]
    for model, own in [(shared, nothing), *models]:
        at = partial(_place, where, model.name, own)
        _check_upstream(model.upstream, at)
        with faults_at(at("deny_patterns", "input")):
            compile_patterns(model.input.deny_patterns)
        if model is shared or model.security != shared.security:
            _check_security(model.security, at)
        _check_tls_is_used(own.get("tls_ca", ""), own.get("tls_cert", ""), model.upstream.endpoints, at)
        if model is not shared or not models:
            _check_schemes(model.upstream, at)
    every = [*shared.upstream.endpoints, *(url for model, _ in models for url in model.upstream.endpoints)]
    upstream = settings.upstream
    _check_tls_is_used(upstream.tls_ca, upstream.tls_cert, every, lambda key: where(f"upstream.{key}"))


def _place(where: Where, name: str, own: ModelSettings, key: str, section: str = "upstream") -> str:
    return where(path_of(name, own, key, section))


def _check_upstream(upstream: UpstreamSettings, at: Where) -> None:
    """Names of fields, the page with the load, the probe."""
    if upstream.inputs_field == upstream.parameters_field:
        raise ConfigError(f"{at('parameters_field')} must differ from inputs_field")
    if len({upstream.outputs_field, upstream.tokens_field, upstream.version_field}) < 3:
        both = f"{at('tokens_field')} and {at('version_field')}"
        raise ConfigError(f"{both} must differ from each other, and from outputs_field")
    with faults_at(at("load")):
        parse_load_source(upstream.load)
    try:
        if upstream.probe_input:
            msgspec.json.decode(upstream.probe_input)
    except (msgspec.DecodeError, RecursionError):
        raise ConfigError(f"{at('probe_input')} must be JSON, a text in quotes for example: '\"hello\"'") from None


def _check_schemes(upstream: UpstreamSettings, at: Where) -> None:
    """A `grpc://` endpoint is for the protocol that speaks it, and the other way round."""
    if upstream.protocol == "kserve_v2_grpc":
        _check_extra(at("protocol"))
    for url in upstream.endpoints:
        needs = ""
        if upstream.protocol != "kserve_v2_grpc" and url.startswith(("grpc://", "grpcs://")):
            needs = f"that needs protocol kserve_v2_grpc, not {upstream.protocol}"
        elif upstream.protocol == "kserve_v2_grpc" and url.startswith("http"):
            scheme = "grpcs" if url.startswith("https") else "grpc"
            needs = f"protocol kserve_v2_grpc needs {scheme}://, and the port on which the server speaks gRPC"
        if needs:
            raise ConfigError(f"{at('endpoints')} has {shown(url)}: {needs}")


def _check_security(security: UpstreamSecurity, at: Where) -> None:
    """Read every file once, so that a fault shows now and not with the first batch."""
    _check_tls(security, at)
    if security.token_file:
        with faults_at(f"{at('token_file')} must be the path of a file with a token:"):
            read_token(security.token_file)
    for name, path in security.header_files:
        with faults_at(f"{at('header_files')}: no value for {name}:"):
            read_header_value(path)
        if security.token_file and name.lower() == "authorization":
            raise ConfigError(f"{at('header_files')} sets Authorization, and so does {at('token_file')}")


def _check_pair(files: TlsFiles, at: Where) -> None:
    """A certificate and its key: both or none."""
    if bool(files.cert) != bool(files.key):
        present, absent = ("tls_cert", "tls_key") if files.cert else ("tls_key", "tls_cert")
        place = at(present)
        raise ConfigError(f"{place} needs {place.partition(' ')[0].removesuffix(present)}{absent} beside it")


def _check_tls(files: TlsFiles, at: Where) -> None:
    """Whether each file can be read, and holds what it should."""
    _check_pair(files, at)
    for key, path in (("tls_ca", files.ca), ("tls_cert", files.cert), ("tls_key", files.key)):
        if path:
            with faults_at(f"{at(key)} cannot be read: {shown(path)}:"):
                read_file(path)
    says = f"{at('tls_ca')} must be a PEM file with certificates"
    try:
        if files.ca:
            UpstreamSecurity(files.ca).ssl_context()
        says = f"{at('tls_cert')} and {at('tls_key')} must be a PEM certificate and its plain key"
        if files.cert:
            UpstreamSecurity(files.ca, files.cert, files.key).ssl_context()
    except (OSError, ValueError):
        raise ConfigError(says) from None


def _check_tls_is_used(tls_ca: str, tls_cert: str, endpoints: Iterable[str], at: Where) -> None:
    """Refuse certificates where no endpoint uses TLS: a plain `http://` must not pass unnoticed."""
    key = "tls_ca" if tls_ca else "tls_cert" if tls_cert else None
    if key and endpoints and not any(url.startswith(("https:", "grpcs:")) for url in endpoints):
        raise ConfigError(f"{at(key)} is of no use: no endpoint starts with https:// or grpcs://")
