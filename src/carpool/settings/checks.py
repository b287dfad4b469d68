"""What no single key can tell: whether the settings go together, and whether the files that they name can be used."""

import re
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec

import msgspec

from carpool.admission.input_policy import BadPatternError, compile_patterns
from carpool.admission.owners import parse_network
from carpool.core.api_key import is_digest, owner_fault
from carpool.core.names import Role, TlsFiles
from carpool.settings.endpoints import GRPC_ENDPOINTS, PLAIN_ENDPOINTS
from carpool.settings.errors import ConfigError, faults_at, shown
from carpool.settings.resolution import (
    HEADER_NAME,
    Model,
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
    BrokerSettings,
    GatewaySettings,
    ModelSettings,
    Settings,
    TracingSettings,
    UpstreamSettings,
    WebhookSettings,
)
from carpool.upstream.load import parse_load_source
from carpool.upstream.tls import UpstreamSecurity, read_file, read_header_value, read_token

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_RECEIVER = re.compile(r"https?://[^\s/?#@]+(?:/[^\s?#]*)?")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+=[\x20-\x7e]*[\x21-\x7e]")
_ORIGIN = re.compile(r"\*|https?://[a-z0-9.-]+(?::[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](?::[0-9]{1,5})?")


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
    check_name(settings.model, where("model"))
    if settings.models and settings.model not in settings.models:
        raise ConfigError(f"{where('model')} must be one of the configured: {', '.join(settings.models)}")
    if settings.tasks.journal and not settings.tasks.data_dir:
        raise ConfigError(f"{where('tasks.data_dir')} must name a directory while tasks.journal is true")
    _check_gateway(settings.gateway, where)
    _check_service(settings, where)
    _check_keys(settings, where)
    _check_tokens(settings, where)
    _check_broker(settings.broker, where)
    _check_tracking(settings, where)
    _check_processes(settings, where)
    _check_models(settings, where)
    _check_tracing(settings.tracing, where)
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
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where} must be 1 to 128 letters, digits or . _ : / -, not {shown(name)}")


def _check_service(settings: Settings, where: Where) -> None:
    tokens = settings.service.token
    if not all(_TOKEN.fullmatch(token) for token in tokens):
        raise ConfigError(f"{where('service.token')} must have tokens of printable ASCII without spaces")
    if not tokens and not is_loopback(settings.gateway.admin_host):
        raise ConfigError(
            f"{where('gateway.admin_host')} is not loopback: that needs service.token "
            "(CARPOOL_SERVICE_TOKEN), which callers of the admin port must then send"
        )


def _check_keys(settings: Settings, where: Where) -> None:
    """The API keys of the configuration. What stands in place of a digest may be the key itself: it is not shown."""
    tiers = [tier.name for tier in settings.tiers]
    models = settings.models or {settings.model}
    seen: dict[str, str] = {}
    for name, key in settings.keys.items():
        at = f"keys.{name}"
        digest = key.sha256.lower()
        if not is_digest(digest):
            how = "`carpool keys create --show-toml` writes one"
            raise ConfigError(f"{where(f'{at}.sha256')} must be a SHA-256 in hex; {how}")
        if digest in seen:
            raise ConfigError(f"{where(f'{at}.sha256')} is that of keys.{seen[digest]} too: one key, one table")
        seen[digest] = name
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
    from carpool.admission.tokens import ALGORITHMS, TokenKeys, TokenRules

    for name in auth.jwt_algorithms:
        if name not in ALGORITHMS:
            raise ConfigError(f"{where('auth.jwt_algorithms')} may have {', '.join(ALGORITHMS)}, not {shown(name)}")
    try:
        TokenKeys(read_file(auth.jwt_file), TokenRules(auth.jwt_algorithms))
    except (OSError, ValueError) as fault:
        # What stands in place of a path may be the secret itself: it is not shown.
        reason = fault.strerror if isinstance(fault, OSError) else fault
        raise ConfigError(f"{where('auth.jwt_file')} must be a file with keys: {reason}") from None


def _check_tracing(tracing: TracingSettings, where: Where) -> None:
    if tracing.otlp_endpoint and not _RECEIVER.fullmatch(tracing.otlp_endpoint):
        raise ConfigError(
            f"{where('tracing.otlp_endpoint')} must be like http://collector:4318, without a user name or a query; "
            "keys go into tracing.headers"
        )
    # The value may be a key: it is not shown.
    if not all(_HEADER.fullmatch(text) for text in tracing.headers):
        raise ConfigError(f"{where('tracing.headers')} must have NAME=VALUE, in printable ASCII")
    for text in tracing.resource_attributes:
        if not text.partition("=")[0].strip() or "=" not in text:
            raise ConfigError(f"{where('tracing.resource_attributes')} must have NAME=VALUE, not {shown(text)}")


def _check_webhooks(webhooks: WebhookSettings, where: Where) -> None:
    if not webhooks.hosts and not webhooks.secrets:
        return
    # Here, so that those without webhooks do not pay for it.
    from carpool.broker.webhooks.rules import allowed_host, secret_of

    for host in webhooks.hosts:
        try:
            allowed_host(host)
        except ValueError as fault:
            raise ConfigError(f"{where('webhooks.hosts')}: {fault}; not {shown(host)}") from None
    for secret in webhooks.secrets:
        try:
            secret_of(secret)
        except ValueError as fault:
            raise ConfigError(f"{where('webhooks.secrets')}: {fault}") from None
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
    _check_proxies(gateway.trusted_proxies, where("gateway.trusted_proxies"))
    for origin in gateway.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            like = "must have origins like https://app.example.com, without a path, or *"
            raise ConfigError(f"{where('gateway.cors_origins')} {like}, not {shown(origin)}")
    files = TlsFiles("", gateway.tls_cert, gateway.tls_key)
    _check_files(files, lambda key: where(f"gateway.{key}"))
    _check_context(files, lambda key: where(f"gateway.{key}"))


def _check_extra(place: str) -> None:
    if any(find_spec(name) is None for name in ("grpc", "grpc_reflection")):
        raise ConfigError(f"{place} needs grpcio: pip install 'carpool[grpc]'")


def _check_proxies(proxies: list[str], where: str) -> None:
    for text in proxies:
        try:
            network = parse_network(text)
        except ValueError as fault:
            hint = ": the address goes on behind the network's bits" if "host bits" in str(fault) else ""
            raise ConfigError(
                f"{where} must have addresses or networks like 10.1.2.3 or 10.0.0.0/8, not {shown(text)}{hint}"
            ) from None
        if network.prefixlen == 0:
            raise ConfigError(f"{where} has {shown(text)}: if everybody is a proxy, nobody is a client")


def _check_broker(broker: BrokerSettings, where: Where) -> None:
    """Check the settings of Redis, as far as that is possible without a connection."""
    check_name(broker.namespace, where("broker.namespace"))
    if not broker.url:
        for name in ("password_file", "tls_ca", "tls_cert", "tls_key"):
            if getattr(broker, name):
                raise ConfigError(f"{where(f'broker.{name}')} is of no use without broker.url")
        if broker.persistence == "forbidden":
            says = "is about Redis, and there is no broker.url; tasks.journal = false keeps payloads off the disk"
            raise ConfigError(f"{where('broker.persistence')} {says}")
        return

    def at(key: str) -> str:
        return where(f"broker.{key}")

    if broker.password_file:
        with faults_at(at("password_file")):
            read_password(broker.password_file)
    files = tls_files(broker)
    _check_files(files, at)
    with faults_at(at("url")):
        broker_address(broker)
    _check_context(files, at)


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
    if tracking.store == "sqlite" and not settings.tasks.data_dir:
        raise ConfigError(f"{where('tasks.data_dir')} must name a directory while tracking.store is sqlite")


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
        _check_fields(model.upstream, at)
        _check_load(model.upstream, at)
        _check_probe_input(model.upstream.probe_input, at)
        with faults_at(at("deny_patterns", "input")):
            _check_patterns(model)
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


def _check_patterns(model: Model) -> None:
    """Whether every pattern can be used, and there is what it takes to use them."""
    try:
        compile_patterns(model.input.deny_patterns)
    except BadPatternError as fault:
        raise ConfigError(str(fault)) from None


def _check_fields(upstream: UpstreamSettings, at: Where) -> None:
    """Of a call, and of an answer, no two fields have the same name."""
    if upstream.inputs_field == upstream.parameters_field:
        raise ConfigError(f"{at('parameters_field')} must differ from inputs_field")
    if len({upstream.outputs_field, upstream.tokens_field, upstream.version_field}) < 3:
        both = f"{at('tokens_field')} and {at('version_field')}"
        raise ConfigError(f"{both} must differ from each other, and from outputs_field")


def _check_load(upstream: UpstreamSettings, at: Where) -> None:
    """How the load of endpoints is learned."""
    if upstream.load_header and not HEADER_NAME.fullmatch(upstream.load_header):
        raise ConfigError(f"{at('load_header')} must name a header, not {shown(upstream.load_header)}")
    try:
        if upstream.load_metrics_url:
            parse_load_source(upstream.load_metrics_url)
    except ValueError as fault:
        raise ConfigError(f"{at('load_metrics_url')} {fault}, not {shown(upstream.load_metrics_url)}") from None


def _check_probe_input(text: str, at: Where) -> None:
    """An input is JSON; that of a text has quotes."""
    try:
        if text:
            msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise ConfigError(f"{at('probe_input')} must be JSON, a text in quotes for example: '\"hello\"'") from None


def _check_schemes(upstream: UpstreamSettings, at: Where) -> None:
    """A `grpc://` endpoint is for the protocol that speaks it, and the other way round."""
    if upstream.protocol == "kserve_v2_grpc":
        _check_extra(at("protocol"))
    for url in upstream.endpoints:
        if url.startswith(("http://", "https://")) and upstream.protocol == "kserve_v2_grpc":
            scheme = "grpcs" if url.startswith("https") else "grpc"
            needs = f"protocol kserve_v2_grpc needs {scheme}://, and the port on which the server speaks gRPC"
            raise ConfigError(f"{at('endpoints')} has {shown(url)}: {needs}")
        if url.startswith(GRPC_ENDPOINTS) and upstream.protocol != "kserve_v2_grpc":
            needs = f"that needs protocol kserve_v2_grpc, not {upstream.protocol}"
            raise ConfigError(f"{at('endpoints')} has {shown(url)}: {needs}")


def _check_security(security: UpstreamSecurity, at: Where) -> None:
    """Read every file once, so that a fault shows now and not with the first batch."""
    _check_files(security, at)
    _check_context(security, at)
    # What stands in place of a path may be the secret itself: it is not shown.
    says = f"{at('token_file')} must be the path of a file with a token"
    try:
        if security.token_file:
            read_token(security.token_file)
        for name, path in security.header_files:
            says = f"{at('header_files')}: no value for {name}"
            read_header_value(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{says}: {error.strerror if isinstance(error, OSError) else error}") from None
    if security.token_file and any(name.lower() == "authorization" for name, _ in security.header_files):
        raise ConfigError(f"{at('header_files')} sets Authorization, and so does {at('token_file')}")


def _check_files(files: TlsFiles, at: Where) -> None:
    """A certificate and its key: both or none. Each file can be read."""
    if bool(files.cert) != bool(files.key):
        present, absent = ("tls_cert", "tls_key") if files.cert else ("tls_key", "tls_cert")
        place = at(present)
        raise ConfigError(f"{place} needs {place.partition(' ')[0].removesuffix(present)}{absent} beside it")
    for key, path in (("tls_ca", files.ca), ("tls_cert", files.cert), ("tls_key", files.key)):
        try:
            if path:
                read_file(path)
        except OSError as error:
            raise ConfigError(f"{at(key)} cannot be read: {shown(path)}: {error.strerror}") from None


def _check_context(files: TlsFiles, at: Where) -> None:
    """Whether the files hold what they should."""
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
    if key and endpoints and all(url.startswith(PLAIN_ENDPOINTS) for url in endpoints):
        raise ConfigError(f"{at(key)} is of no use: no endpoint starts with https:// or grpcs://")
