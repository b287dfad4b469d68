"""Endpoints that have answered no call well since the start: what operators can read, and what becomes of tasks.

1. Until an endpoint has answered one call, Carpool cannot tell a bad input from a path, a credential or a field name
   that is wrong. So the log says what the endpoint does, with the first failure and then at growing intervals, and
   which setting to look at; `/internal/fleet` and `/internal/health` say the same.
2. Of what the API itself says only names of fields are repeated: those that FastAPI puts into `loc`, the outermost
   name alone, and none that a client may have chosen.
3. A task that fails before any endpoint of its model has answered is tried again until its own time is over. Then it
   gets the error of its last attempt, and is a dead letter.
"""

import re
from collections.abc import Sequence
from math import inf
from urllib.parse import urlsplit

import msgspec

from carpool.core.errors import CarpoolError

# Rule 1: from the first line to the second, doubled each time, up to the longest; and after a failure of another kind.
SAY_AGAIN_S, SAY_AGAIN_S_MAX, SAY_OTHER_S = 10.0, 600.0, 5.0
# So many kinds of failures are worth a line of their own. The seconds in their texts differ from call to call.
KINDS_MAX = 8
_SECONDS = re.compile(r"[0-9]+\.[0-9]+")
# Rule 2.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")
NAMES_MAX = 5
# What is added to the errors of clients.
_NEVER_WORKED = (
    "the inference API has answered no call well so far: the log and /internal/health of the gateway say why"
)
# What to look at where no answer came.
LOOK_AT_ADDRESS = "look at the address in upstream.endpoints, and whether the API runs there"


class Trouble:
    """What an endpoint does that has not answered yet."""

    __slots__ = ("_kinds", "_pause_s", "_say_at", "calls", "text", "what")

    def __init__(self) -> None:
        # What became of the last call; with the number of calls, and with what to look at.
        self.what = self.text = ""
        self.calls = 0
        self._say_at = -inf
        self._pause_s = SAY_AGAIN_S
        self._kinds: set[str] = set()

    def failed(self, what: str, look_at: str, now: float) -> bool:
        """One more call failed; whether it is time to say so."""
        if len(self._kinds) < KINDS_MAX and (kind := _SECONDS.sub("", what)) not in self._kinds:
            self._kinds.add(kind)
            self._pause_s, self._say_at = SAY_AGAIN_S, min(self._say_at, now + SAY_OTHER_S)
        self.calls += 1
        self.what = what
        self.text = f"has answered no call well so far ({self.calls} failed, the last one so: {what}); {look_at}"
        if now < self._say_at:
            return False
        self._say_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, SAY_AGAIN_S_MAX)
        return True


def never_worked(error: CarpoolError) -> CarpoolError:
    """The error for a client where it is not known whether its request is at fault."""
    return type(error)(f"{error.detail} ({_NEVER_WORKED})", retry_after_s=error.retry_after_s)


def status_told(status: int, endpoint: str, path: str, names: Sequence[str]) -> str:
    """What became of a call that was answered with an error. `path`: what the protocol adds to a bare address."""
    where = f" to POST {path}" if path and urlsplit(endpoint).path in ("", "/") else ""
    fields = f", and spoke of the field{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""
    return f"it answered {status}{where}{fields}"


def look_at_after(status: int, inputs_field: str) -> str:
    """What to look at after an error status. `inputs_field`: how the call names its inputs, if that is a setting."""
    if 300 <= status < 400:
        return "redirects are not followed: name the address that it leads to in upstream.endpoints"
    if status in (404, 405, 410, 501):
        return "look at the path in upstream.endpoints"
    if status in (401, 402, 403, 407):
        return "look at the credentials: upstream.token_file, upstream.header_files"
    if status in (400, 415, 422):
        if inputs_field:
            return (
                f"look at upstream.inputs_field (the call has `{inputs_field}`) and upstream.protocol, or at the inputs"
            )
        return "look at upstream.protocol and the name of the model, or at the inputs"
    if status == 500 and inputs_field:  # so do those that look for a field and do not find it
        return f"look at the API's own log, and at upstream.inputs_field (the call has `{inputs_field}`)"
    return "look at the API's own log"


def look_at_answer(outputs_field: str) -> str:
    """What to look at after an answer that cannot be used."""
    if outputs_field:
        return f"look at upstream.outputs_field (now `{outputs_field}`) and upstream.protocol"
    return "look at upstream.protocol"


class _Fault(msgspec.Struct):
    loc: msgspec.Raw = msgspec.Raw()  # what is beside it may be a client's, and take long to read


class _Faults(msgspec.Struct):
    detail: list[_Fault] = []


_decode_faults = msgspec.json.Decoder(_Faults).decode
_decode_place = msgspec.json.Decoder(list[str | int]).decode


def field_names(body: bytes, parameters: bytes) -> list[str]:
    """The fields of the call that FastAPI's 422 speaks of; none that stands in the client's own `parameters`."""
    try:
        faults = _decode_faults(body).detail
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    names: dict[str, None] = {}
    for fault in faults:
        try:
            start, name, *_ = _decode_place(fault.loc)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError):  # also of a place that is too short
            continue
        if start != "body" or not isinstance(name, str):
            continue
        if _NAME.fullmatch(name) and b'"%b"' % name.encode() not in parameters:
            names[name] = None
        if len(names) == NAMES_MAX:
            break
    return list(names)
