"""What the answers of an inference API mean, in words, with the setting to change. Pure.

The doctor sends inputs of its own, so what an API says of them is no client's secret; it is shown on the terminal, cut
short, and kept nowhere.
"""

import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from yarl import URL

from carpool.core.finding import Change, Finding, Level
from carpool.settings import is_loopback, total_timeout_s
from carpool.settings.schema import MODEL_SECTIONS, Settings, UpstreamSettings
from carpool.upstream.codecs.base import Refusal
from carpool.upstream.codecs.tensors import tensor_defaults
from carpool.upstream.endpoint import UpstreamResponse

# The names that APIs give to their inputs and outputs.
USUAL_FIELDS = (
    ("inputs", "outputs"),
    ("instances", "predictions"),
    ("input", "data"),
    ("texts", "embeddings"),
    ("input", "output"),
)
# What an answer may tell of each input beside its output.
ASIDE = ("tokens_used", "tokens", "model_version")
USUAL_INPUTS = tuple(dict.fromkeys(name for name, _ in USUAL_FIELDS))
# With these statuses an API may refuse the names of the fields, or the inputs.
OF_THE_CALL = (400, 422, 500)
HEARD_CHARS_MAX = 400
NAME_CHARS_MAX = 64
NAMED_MAX = 8
# Of all tensors of an input together, whatever a server says of their shapes.
ELEMENTS_MAX = 1_000_000
# A call that needs more than this share of its timeout has little to spare for a busy hour.
TIME_SHARE_MAX = 0.5

# OpenSSL's codes for a certificate of another name or address, and what it says of bytes that are no TLS.
_OTHER_NAME = (62, 64)
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")

_GIVE_INPUT = "give it one that your model takes: `carpool doctor … --input JSON`"


class Tried(msgspec.Struct, frozen=True):
    """One call of the doctor's, and what came of it."""

    size: int
    seconds: float
    # None: no answer came.
    answer: UpstreamResponse | None = None
    # What is wrong with the call or its answer; "" if nothing is.
    fault: str = ""
    # What an error status means.
    refusal: Refusal | None = None
    inputs_field: str = ""
    # Where the protocol's calls go if the URL has no path; "": the protocol does not say.
    path: str = ""

    @property
    def is_accepted(self) -> bool:
        """The API took the call, whatever is to be said of its answer."""
        return self.answer is not None and 200 <= self.answer.status < 300

    @property
    def body(self) -> bytes:
        """What it answered."""
        return self.answer.body if self.answer else b""

    @property
    def is_of_the_call(self) -> bool:
        """Whether the call may work with other names, or other inputs."""
        return bool(self.fault) and self.answer is not None and (self.is_accepted or self.answer.status in OF_THE_CALL)


class Where(NamedTuple):
    """The model whose API it is, and where its settings stand."""

    settings: Settings
    model: str
    upstream: UpstreamSettings

    def path(self, key: str, section: str = "upstream") -> str:
        """The path of a setting: the model's own, where models have it."""
        is_own = self.settings.models and section in MODEL_SECTIONS
        return f"models.{self.model}.{key}" if is_own else f"{section}.{key}"


# What an API tells of its fields


class Fault(NamedTuple):
    """One of the faults that FastAPI lists: where in the body, and of which kind."""

    place: tuple[str | int, ...]
    kind: str

    @property
    def is_missing(self) -> bool:
        """The field is not there."""
        return "missing" in self.kind


def faults_of(body: bytes) -> list[Fault]:
    """What FastAPI (or pydantic) lists in a 422; empty if it is not of that form."""
    said = _parse(body)
    listed = said.get("detail") if isinstance(said, dict) else None
    faults = []
    for fault in listed[:NAMED_MAX] if isinstance(listed, list) else ():
        place = fault.get("loc") if isinstance(fault, dict) else None
        if isinstance(place, list) and place[:1] == ["body"] and all(isinstance(part, str | int) for part in place):
            faults.append(Fault(tuple(place[1:]), str(fault.get("type"))))
    return faults


def missing_fields(body: bytes) -> list[str]:
    """The fields that the API says it wants."""
    places = (fault.place for fault in faults_of(body) if fault.is_missing)
    return [str(place[0]) for place in places if len(place) == 1 and is_name(place[0])]


def output_fields(body: bytes, size: int, inputs_field: str = "") -> list[str]:
    """The fields of an answer with one output for each of `size` inputs, the likeliest first."""
    said = _parse(body)
    if not isinstance(said, dict):
        return []
    found = [name for name, value in said.items() if isinstance(value, list) and len(value) == size and is_name(name)]
    usual = sorted(USUAL_FIELDS, key=lambda pair: pair[0] != inputs_field)  # those that go with the inputs' name first
    order = [name for _, name in usual]
    return sorted(found, key=lambda name: order.index(name) if name in order else len(order) + (name in ASIDE))


def is_name(name: object) -> bool:
    """Whether it can be the name of a field, in a configuration and on a terminal."""
    return isinstance(name, str) and 0 < len(name) <= NAME_CHARS_MAX and name.isprintable()


def post_paths(body: bytes) -> list[str]:
    """The paths that take a POST, by an OpenAPI document."""
    said = _parse(body)
    paths = said.get("paths") if isinstance(said, dict) else None
    if not isinstance(paths, dict):
        return []
    found = [path for path, methods in paths.items() if isinstance(methods, dict) and "post" in methods]
    return [path for path in found if is_name(path) and "{" not in path and " " not in path][:NAMED_MAX]


def _parse(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def heard(body: bytes) -> str:
    """An API's own words for a terminal: one line, cut short, without what could drive the terminal."""
    text = " ".join(body[: 4 * HEARD_CHARS_MAX].decode(errors="replace").split())
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= HEARD_CHARS_MAX else text[:HEARD_CHARS_MAX] + "…"


# What is wrong


def check_reach(url: str, failure: Exception, where: Where) -> Finding:
    """Why no connection can be made: the name or the port."""
    path = where.path("endpoints")
    if url.startswith("unix:"):
        says = f"nobody can be reached at the socket {url.removeprefix('unix:').partition(':')[0]}: {_reason(failure)}"
        return Finding("api port", "problem", says, f"start the API, or correct the path in {path}")
    host = URL(url).host or ""
    if isinstance(failure, socket.gaierror | UnicodeError):
        says = f"the name {host} does not resolve: {_reason(failure)}"
        return Finding("api name", "problem", says, f"correct the host in {path}, or the DNS of this machine")
    says = f"{place(url)} cannot be reached: {_reason(failure)}"
    if isinstance(failure, ConnectionRefusedError):
        says = f"{place(url)} refuses connections: nothing listens there"
    do = f"start the API, or correct host and port in {path}"
    if is_loopback(host):
        do += "; in a container, this address is the container itself"
    return Finding("api port", "problem", says, do)


def check_tls(url: str, failure: Exception, where: Where) -> Finding:
    """Why no TLS can be had at a port that takes connections."""
    path, scheme = where.path, URL(url).scheme
    plain = f"write {scheme.removesuffix('s')}:// in place of {scheme}:// in {path('endpoints')}"
    says = f"TLS with {place(url)} fails: {_reason(failure)}"
    do = f"see {path('tls_ca')}, {path('tls_cert')} and {path('tls_key')}; if the API has no TLS, {plain}"
    if isinstance(failure, ssl.SSLCertVerificationError):
        says = f"the certificate of {place(url)} is not trusted: {failure.verify_message}"
        do = f"set {path('tls_ca')} to the PEM file of the authority that signed it"
        if failure.verify_code in _OTHER_NAME:
            says = f"the certificate of {place(url)} is for another name than {URL(url).host}"
            do = f"write the name that it is for into {path('endpoints')}"
    elif isinstance(failure, ssl.SSLError) and failure.reason in _NOT_TLS:
        says, do = f"{place(url)} does not speak TLS", plain
    return Finding("api tls", "problem", says, do)


def place(url: str) -> str:
    """Host and port of a URL."""
    return f"{URL(url).host}:{port_of(URL(url))}"


def port_of(url: URL) -> int:
    """Where a URL leads; yarl knows no port for gRPC."""
    return url.port or (80 if url.scheme == "http" else 443)


def _reason(failure: Exception) -> str:
    """The system's own words."""
    if isinstance(failure, ssl.SSLError):
        return failure.reason or "the connection ended"
    if isinstance(failure, TimeoutError):
        return "no answer in time"
    words = failure.strerror if isinstance(failure, OSError) else None
    return words or type(failure).__name__


def check_status(tried: Tried, where: Where, path: str, known_paths: Sequence[str]) -> Finding:
    """What an answer with an error status, or none, says of the configuration."""
    at = where.path
    if tried.answer is None:
        return Finding(
            "api answer",
            "problem",
            f"a call of {tried.size} brought no answer: {tried.fault}",
            _do_without_answer(where),
        )
    status, words = tried.answer.status, heard(tried.body)
    if status in (404, 405):
        what = "has no such path" if status == 404 else "takes no POST there"
        says = f"the API answers {status} to POST {path}: it {what}"
        do = f"correct the path in {at('endpoints')}"
        if known_paths:
            do += f"; by its /openapi.json it takes a POST at {', '.join(known_paths)}"
        if where.upstream.protocol != "json":
            do += f"; or the name of the model, which is `{where.model}` here"
        if tried.path not in ("", path):
            do += f"; without a path, Carpool calls {tried.path}"
        return Finding("api path", "problem", says, do, changes=_at_path(where, known_paths), heard=words)
    if status in (401, 403):
        secrets = [key for key in ("token_file", "header_files") if getattr(where.upstream, key)]
        if secrets:
            says = f"the API answers {status}: it does not accept the credentials"
            do = f"see what is in the files of {' and '.join(map(at, secrets))}"
        else:
            says = f"the API answers {status}: it wants credentials, and none are configured"
            do = (
                f"write its token into a file and set {at('token_file')} (sent as `Authorization: Bearer …`), or "
                f'{at("header_files")} = ["X-Api-Key=FILE"]'
            )
        return Finding("api credentials", "problem", says, do, heard=words)
    if 300 <= status < 400:
        says = f"the API answers {status}: it sends the call elsewhere, and Carpool does not follow"
        do = f"write the last address into {at('endpoints')}; often it differs by a / at the end, or by https"
        return Finding("api path", "problem", says, do, heard=words)
    if status in (429, 502, 503, 504):
        says, do = f"the API answers {status}: it is busy, or not there yet", "run this again when it is ready"
        return Finding("api answer", "problem", says, do, heard=words)
    do = f"look into the API's own log; if it means the input, {_GIVE_INPUT}"
    return Finding("api answer", "problem", f"the API answers {status}", do, heard=words)


def _at_path(where: Where, paths: Sequence[str]) -> tuple[Change, ...]:
    """The one endpoint at the one path that it may have."""
    urls = where.upstream.endpoints
    if len(paths) != 1 or len(urls) != 1 or not urls[0].startswith("http") or "?" in urls[0]:
        return ()
    return ((where.path("endpoints"), (str(URL(urls[0]).with_path(paths[0])),)),)


def _do_without_answer(where: Where) -> str:
    do = f"see that {where.path('endpoints')} names the API, and `{where.upstream.protocol}` is what it speaks there"
    if any(url.startswith(("https:", "grpcs:")) for url in where.upstream.endpoints) and not where.upstream.tls_cert:
        do += f"; if it asks its clients for a certificate, set {where.path('tls_cert')} and {where.path('tls_key')}"
    return do


def check_call(tried: Tried, where: Where) -> Finding:
    """What is wrong with a call that the API understood, and did not answer well under any usual name."""
    name, words, at = tried.inputs_field, heard(tried.body), where.path
    faults = faults_of(tried.body)
    missing = [field for field in missing_fields(tried.body) if field != name]
    own = [fault for fault in faults if fault.place[:1] == (name,) and not fault.is_missing]
    is_json = where.upstream.protocol == "json"
    changes = (("upstream.inputs_field", name),) if name != where.upstream.inputs_field else ()

    def problem(says: str, do: str, changes: tuple[Change, ...] = ()) -> Finding:
        return Finding("api fields", "problem", says, do, changes=changes, heard=words)

    if is_json and any(fault.place == () and not fault.is_missing for fault in faults):
        says = "the API wants another body than a JSON object, perhaps the array of inputs itself"
        do = "have it take an object with a field for the inputs (in FastAPI: `Body(embed=True)`)"
        return problem(says, do)
    if is_json and any(len(fault.place) == 1 for fault in own):
        says = f"the API takes something else than an array of inputs in `{name}`: it cannot be called with a batch"
        do = f"Carpool needs a path that takes an array and answers with one (in FastAPI: `{name}: list[str]`)"
        return problem(says, do)
    if is_json and missing and not tried.is_accepted:
        listed = ", ".join(f"`{field}`" for field in missing)
        if name in USUAL_INPUTS and name not in missing and len(missing) == 1:
            says, do = f"the API wants the field {listed}", f"set {at('inputs_field')} to it; and {_GIVE_INPUT}"
            return problem(says, do, (("upstream.inputs_field", missing[0]),))
        says = f"beside `{name}`, the API wants {listed}; Carpool sends inputs, and the parameters that clients give"
        return problem(says, "give these a default in the API", changes)
    if is_json and (own or changes) and not tried.is_accepted:
        says = f"the API takes its inputs in `{name}`, but none of those that the doctor has ({tried.fault})"
        return problem(says, _GIVE_INPUT, changes)
    if tried.is_accepted:
        says = f"the API took the call, and its answer is not understood: {tried.fault}"
        if not is_json:
            return problem(says, f"see whether {at('protocol')} is what it speaks")
        if isinstance(_parse(tried.body), list):
            do = f'protocol `tei_embed` sends {{"inputs": […]}} and takes a bare array; {at("protocol")} sets it'
            return problem(says, f"have it answer with an object that has an array of outputs; or: {do}")
        do = f"set {at('outputs_field')} to the field that has an array with one output for each input"
        return problem(says, do)
    status = tried.answer.status if tried.answer else 0
    names = f", also with the names {', '.join(USUAL_INPUTS)} for its field" if is_json else ""
    says = f"the API answers {status} to inputs of the doctor's own{names}"
    do = f"{_GIVE_INPUT}; {at('inputs_field')} is the name of its field" if is_json else _GIVE_INPUT
    return problem(says, do)


def check_two(two: Tried, where: Where) -> Finding:
    """A call of two that failed where a call of one works."""
    changes = ((where.path("max_batch", "batching"), 1),)
    if two.is_accepted:
        says = f"a call of one input works; of two it does not: {two.fault}"
        do = "the API must give one output for each input, in their order; until it does, send one at a time"
        return Finding("api outputs", "problem", says, do, changes=changes, heard=heard(two.body))
    what = f"with status {two.answer.status}" if two.answer else f"({two.fault})"
    says, do = f"a call of one input works; one of two is refused {what}", "send one at a time"
    return Finding("api batch", "problem", says, do, changes=changes, heard=heard(two.body))


def check_limit(largest: int, refused: Tried | None, where: Where, max_batch: int) -> Finding:
    """How many inputs the API takes at once, against how many are sent."""
    path = where.path("max_batch", "batching")
    if refused is None:
        if largest >= max_batch:
            return Finding(
                "api batch", "ok", f"a call of {largest} inputs works; that is the most that is sent ({path})"
            )
        says = f"a call of {largest} inputs works; larger ones, up to {max_batch}, were not tried: they would take long"
        return Finding("api batch", "ok", says)
    says = f"the API takes {largest} inputs at once, and up to {max_batch} are sent"
    is_stated = refused.refusal is not None and refused.refusal.batch_max is not None
    cost = "Carpool learns it from the error" if is_stated else "larger batches are refused, and cost further calls"
    do, changes = f"set {path} = {largest}", ((path, largest),)
    level: Level = "warning" if is_stated else "problem"
    return Finding("api batch", level, f"{says}: {cost}", do, changes=changes, heard=heard(refused.body))


def check_time(slowest: Tried, first: Tried, where: Where) -> Finding:
    """How long a call takes, against how long it may."""
    timeout_s, total_s = where.upstream.timeout_s, total_timeout_s(where.settings)
    path = where.path("timeout_s")
    took = f"a call of {slowest.size} took {slowest.seconds:.2f} s"
    allowed = f"{path} is {timeout_s:g}, broker.total_timeout_s {total_s:g}"
    if slowest.seconds > TIME_SHARE_MAX * min(timeout_s, total_s):
        is_late = slowest.seconds >= min(timeout_s, total_s)
        wanted_s = max(timeout_s, _round_up(2 * slowest.seconds))
        wanted_total_s = max(total_s, wanted_s + 1)
        says = f"{took}, and {allowed}: " + ("clients get errors" if is_late else "there is little to spare")
        changes = ((path, wanted_s), ("broker.total_timeout_s", wanted_total_s))
        return Finding("api time", "problem" if is_late else "warning", says, "give calls more time", changes=changes)
    if first.seconds >= min(timeout_s, total_s):
        says = f"the first call took {first.seconds:.2f} s, later ones at most {slowest.seconds:.2f} s ({allowed})"
        return Finding("api time", "warning", says, "let the API warm up before clients come")
    return Finding("api time", "ok", f"{took}; {allowed}")


def _round_up(seconds: float) -> float:
    """To a number that a person would write."""
    return float(next(nice for nice in (1, 2, 3, 5, 10, 15, 20, 30, 60, 120, 300, 600) if nice >= min(seconds, 600)))


# Inputs of the doctor's own


def own_inputs(upstream: UpstreamSettings, metadata: bytes = b"") -> list[list[bytes]]:
    """Kinds of inputs to try, each with two that differ, as JSON."""
    texts = [b'"carpool doctor one"', b'"carpool doctor two"']
    if upstream.protocol in ("json", "kserve_v1"):
        return [texts, [b"1", b"2"], [b"[1.0, 2.0]", b"[2.0, 1.0]"]]
    if upstream.protocol in ("kserve_v2", "kserve_v2_grpc"):
        return [[msgspec.json.encode(_tensors(upstream, metadata))] * 2]
    return [texts]


def _tensors(upstream: UpstreamSettings, metadata: bytes) -> dict[str, Any]:
    """Zeros for each tensor that the model has, by what the server says of it, else by the settings."""
    said = _parse(metadata)
    listed = said.get("inputs") if isinstance(said, dict) else None
    known = tensor_defaults(upstream.tensor)
    if not known.name and isinstance(listed, list) and all(map(_is_tensor, listed)) and listed:
        most = ELEMENTS_MAX // len(listed)
        return {each["name"]: _zeros(each["datatype"], each["shape"], most) for each in listed}
    return {known.name or "input": _zeros(known.datatype or "FP32", list(known.shape) or [1, 1])}


def _is_tensor(said: object) -> bool:
    match said:
        case {"name": str(), "datatype": str(), "shape": list(shape)}:
            return 0 < len(shape) <= NAMED_MAX and all(isinstance(length, int) for length in shape)
    return False


def _zeros(datatype: str, shape: Sequence[int], most: int = ELEMENTS_MAX) -> Mapping[str, Any]:
    lengths = [1, *(min(max(length, 1), 4096) for length in shape[1:])]  # -1: any
    count = 1
    for length in lengths:
        count = min(count * length, most)
    if datatype in ("FP16", "BF16"):
        return {"datatype": datatype, "shape": lengths, "b64": bytes(2 * count)}
    zero = {"BOOL": False, "BYTES": "carpool doctor"}.get(datatype, 0)
    return {"datatype": datatype, "shape": lengths, "data": [zero] * count}
