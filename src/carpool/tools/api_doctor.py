"""The doctor at an inference API: it makes calls with inputs of its own, and tells what is wrong with the settings.

1. The calls are made with the codec, the client, the TLS and the credentials of `carpool serve`.
2. The doctor tries everything at the first endpoint that answers well: the names of the fields, and the batch limit.
   At the other endpoints it only checks whether they do the same.
3. Everything is bounded in time: the calls of a search, larger and larger calls, and each call.
"""

import asyncio
import secrets
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import cycle, islice, product
from typing import Any, TypeVar
from urllib.parse import quote

from msgspec.structs import replace
from yarl import URL

from carpool.core.clock import monotonic
from carpool.core.defaults import do_nothing
from carpool.core.errors import Malformed
from carpool.core.finding import Finding, merged
from carpool.core.request import Nobody, Request
from carpool.service import ModelFace, addresses, endpoint_maker
from carpool.settings import Model, Settings
from carpool.tools.api_checks import (
    ASIDE,
    NAMED_MAX,
    USUAL_INPUTS,
    Tried,
    Where,
    check_call,
    check_limit,
    check_reach,
    check_status,
    check_time,
    check_tls,
    check_two,
    faults_of,
    missing_fields,
    output_fields,
    own_inputs,
    place,
    port_of,
    post_paths,
)
from carpool.upstream.call_ids import CallIds
from carpool.upstream.client import without_secrets
from carpool.upstream.codecs import ProtocolFaultError
from carpool.upstream.endpoint import AttemptFailedError, ConnectionWasDeadError, Endpoint, UpstreamResponse
from carpool.upstream.fleet import Address
from carpool.upstream.health import HasPages
from carpool.upstream.tls import UpstreamSecurity

CONNECT_S_MAX = 5.0
# A call is waited for longer than `timeout_s` allows, so that it can be said how long it takes.
ANSWER_S_MAX = 30.0
PAGE_S_MAX = 3.0
SEARCH_S_MAX = 30.0
# Larger calls are tried while they take no longer than this, all together.
LIMIT_S_MAX = 20.0
AT_ONCE = 16

T = TypeVar("T")
Say = Callable[[str], None]


class ApiDoctor:
    """One examination of the endpoints of one model."""

    def __init__(self, settings: Settings, model: Model, given: bytes = b"", say: Say = do_nothing) -> None:
        self._where = Where(settings, model.name, model.upstream)
        # With the names of the fields that are known to work, once they are.
        self._model = model
        # Kinds of inputs, and the kind that the API takes as far as is known.
        given = given or model.upstream.probe_input.encode()
        self._kinds = [[given]] if given else []
        self._values: list[bytes] = []
        self._say = say
        self._ids = CallIds(secrets.token_hex(4))
        self._is_searched = self._is_at_other_path = False
        # Fields that may have the outputs too.
        self._other_outputs: list[str] = []
        # Good calls, in the order in which they were made.
        self._good: list[Tried] = []

    async def examine(self) -> list[Finding]:
        """Every finding, in the order of the checks."""
        async with AsyncExitStack() as opened:
            make = endpoint_maker(self._model, monotonic)

            def open_endpoint(address: Address) -> Endpoint:
                endpoint = make(address)
                opened.push_async_callback(endpoint.close)
                return endpoint

            self._open = open_endpoint
            endpoints = {address.url: open_endpoint(address) for address in addresses(self._model)}
            try:
                findings = merged(await self._examine_all(endpoints), len(endpoints))
            except Malformed as refusal:
                says = f"protocol {self._model.upstream.protocol} has no such input: {refusal.detail}"
                findings = [Finding("api input", "problem", says, "give another one with --input")]
        if len(self._where.settings.models) > 1:
            findings = [replace(each, where=(f"model {self._model.name}", *each.where)) for each in findings]
        return findings

    async def _examine_all(self, endpoints: Mapping[str, Endpoint]) -> list[Finding]:
        self._say("connecting")
        reached = dict(zip(endpoints, await gather(map(self._reach, endpoints)), strict=True))
        findings = [_at(endpoints[url], finding) for url, finding in reached.items() if finding is not None]
        waiting = [url for url, finding in reached.items() if finding is None]
        lead: Endpoint | None = None
        while waiting and lead is None:
            url = waiting.pop(0)
            found, lead = await self._examine(url, endpoints[url])
            findings += found
        others = await gather(self._examine(url, endpoints[url]) for url in waiting)
        findings += [finding for found, _ in others for finding in found]
        if lead is not None:
            findings.append(await self._find_limit(lead))
        if self._good:
            slowest = max(self._good[1:] or self._good, key=lambda tried: tried.seconds)
            findings.append(check_time(slowest, self._good[0], self._where))
        return findings

    async def _reach(self, url: str) -> Finding | None:
        """What is in the way to an endpoint; None if nothing is."""
        if url.startswith("sim:"):
            return None
        try:
            await connect(url)
        except (OSError, ValueError) as failure:  # among ValueErrors, names that cannot be ones
            return check_reach(url, failure, self._where)
        if not url.startswith(("https:", "grpcs:")):
            return None
        context = self._model.security.ssl_context()
        context.set_alpn_protocols(["h2"] if url.startswith("grpcs:") else ["http/1.1"])
        try:
            await connect(url, context)
        except (OSError, ValueError) as failure:
            return check_tls(url, failure, self._where)
        return None

    # Calling it

    async def _examine(self, url: str, endpoint: Endpoint) -> tuple[list[Finding], Endpoint | None]:
        """What one endpoint does with a call of one and a call of two; itself, if it does both well."""
        if not self._kinds:
            # A V2 server says which tensors its model takes.
            is_v2, page = self._model.upstream.protocol == "kserve_v2", f"/v2/models/{quote(self._model.name, safe='')}"
            self._kinds = own_inputs(self._model.upstream, await self._page(endpoint, page) if is_v2 else b"")
        self._values = self._values or self._kinds[0]
        findings: list[Finding] = []
        tried = await self._call(endpoint, 1)
        if tried.is_of_the_call and not self._is_searched:
            self._is_searched = True
            tried = await self._search(endpoint, tried)
            if not tried.fault:
                findings += self._names_found()
        if not tried.fault and self._model.batching.max_batch > 1:
            tried = await self._call(endpoint, 2)
            if tried.fault and not (await self._call(endpoint, 1)).fault:
                return [*findings, _at(endpoint, check_two(tried, self._where))], None
        if not tried.fault:
            says = f"the API answers a call of one input{' and a call of two' if tried.size > 1 else ''} as it should"
            return [*findings, _at(endpoint, Finding("api answer", "ok", says))], endpoint
        finding = await self._explain(url, endpoint, tried)
        findings.append(_at(endpoint, finding))
        other = next((value[0] for _, value in finding.changes if isinstance(value, tuple)), "")
        if other and not self._is_at_other_path:
            # There is one path that it can be: what else is wrong shows there.
            self._is_at_other_path = True
            found, lead = await self._examine(other, self._open(Address(other, endpoint.slots)))
            return findings + found, lead
        return findings, None

    async def _call(self, endpoint: Endpoint, size: int, model: Model | None = None) -> Tried:
        """One call of so many inputs; raises Malformed if the protocol has no such inputs."""
        model = model or self._model
        self._say(f"a call of {size} to {endpoint.name}")
        face, now, call_id = ModelFace(model), time.monotonic(), self._ids.next()
        batch = [
            Request("doctor", model.name, b"", value, len(value), 0, now, now, 0.0, now, Nobody())
            for value in islice(cycle(self._values), model.batching.max_batch if model.upstream.pad else size)
        ]
        for request in batch:
            face.prepare(request)
        call = face.codec.encode(batch, call_id)
        tried = Tried(size, 0.0, path=call.path, inputs_field=model.upstream.inputs_field)
        wait_s = max(ANSWER_S_MAX, model.upstream.timeout_s)
        began = time.monotonic()
        try:
            try:
                answer = await endpoint.post(call, wait_s)
            except ConnectionWasDeadError:  # the API had closed a connection that rested: a new one will do
                began = time.monotonic()
                answer = await endpoint.post(call, wait_s)
        except AttemptFailedError as failure:
            return replace(tried, seconds=time.monotonic() - began, fault=str(failure))
        seconds = time.monotonic() - began
        # Parts of it are shown, and it may repeat the headers of the call.
        shown = UpstreamResponse(answer.status, without_secrets(model.security.headers(), answer.body))
        tried = replace(tried, seconds=seconds, answer=shown)
        if not tried.is_accepted:
            refusal = face.codec.classify(answer, size, call_id)
            return replace(tried, fault=f"status {answer.status}", refusal=refusal)
        try:
            face.codec.decode(answer, batch, call_id)
        except ProtocolFaultError as fault:
            return replace(tried, fault=str(fault))
        self._good.append(tried)
        return tried

    async def _page(self, endpoint: Endpoint, path: str) -> bytes:
        """A page of the API, if it has that."""
        if not isinstance(endpoint, HasPages):
            return b""
        try:
            answer = await endpoint.get(path, PAGE_S_MAX)
        except AttemptFailedError:
            return b""
        # Names in it are shown, too.
        return without_secrets(self._model.security.headers(), answer.body) if answer.status == 200 else b""

    async def _explain(self, url: str, endpoint: Endpoint, tried: Tried) -> Finding:
        """What is wrong with a call, in words."""
        status = tried.answer.status if tried.answer else 0
        if url.startswith("http:") and status in (0, 400):
            context = UpstreamSecurity().ssl_context()
            # Nothing is sent: it is only asked whether this is TLS, whatever the certificate.
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with suppress(OSError, ValueError):
                await connect(url, context)
                says, path = f"{place(url)} speaks TLS", self._where.path("endpoints")
                return Finding("api tls", "problem", says, f"write https:// in place of http:// in {path}")
        if tried.is_of_the_call:
            return check_call(tried, self._where)
        known = post_paths(await self._page(endpoint, "/openapi.json")) if status in (404, 405) else []
        own_path = URL(url).path if "://" in url else url
        return check_status(tried, self._where, own_path if own_path != "/" else tried.path or "/", known)

    # Names and limits

    async def _search(self, endpoint: Endpoint, first: Tried) -> Tried:
        """Try other names for the fields, and other inputs; returns the call that worked, else the most telling one."""
        upstream, give_up_at = self._model.upstream, time.monotonic() + SEARCH_S_MAX
        is_json = upstream.protocol == "json"
        told = missing_fields(first.body) if is_json else []
        names = list(dict.fromkeys([upstream.inputs_field, *told, *(USUAL_INPUTS if is_json else ())]))
        closest = tried = first
        tells = (False, False)
        for values, name in product(self._kinds, names):
            self._values = values
            model = _with_fields(self._model, name, upstream.outputs_field)
            if values is not self._kinds[0] or name != upstream.inputs_field:
                tried = await self._call(endpoint, 1, model)
            if not tried.fault:
                self._model = model
                return tried
            outputs = output_fields(tried.body, 1, name) if is_json and tried.is_accepted else []
            if outputs:
                return await self._choose_outputs(endpoint, tried, outputs)
            if not tried.is_of_the_call:
                return tried
            is_named = name in told or any(fault.place[:1] == (name,) for fault in faults_of(tried.body))
            if (tried.is_accepted, is_named) > tells:
                closest, tells = tried, (tried.is_accepted, is_named)
            if time.monotonic() > give_up_at:
                break
        self._values = self._kinds[0]
        return closest

    async def _choose_outputs(self, endpoint: Endpoint, one: Tried, outputs: Sequence[str]) -> Tried:
        """Which of the fields has the outputs: a call of two tells it from a field that happens to have one element."""
        two = await self._call(endpoint, 2, _with_fields(self._model, one.inputs_field, outputs[0]))
        both = [name for name in output_fields(two.body, 2, one.inputs_field) if name in outputs]
        chosen, *self._other_outputs = both or outputs
        self._model = _with_fields(self._model, one.inputs_field, chosen)
        self._good = [replace(one, fault=""), *self._good]
        return self._good[0]

    def _names_found(self) -> list[Finding]:
        """The names that work, where they are others than those in the settings."""
        given, found = self._where.upstream, self._model.upstream
        keys = ("inputs_field", "outputs_field")
        changes = tuple((f"upstream.{key}", str(getattr(found, key))) for key in keys)
        if all(getattr(given, key) == getattr(found, key) for key in keys):
            return []
        says = (
            f"the API takes its inputs in `{found.inputs_field}` and gives its outputs in `{found.outputs_field}`, and "
            f"the settings say `{given.inputs_field}` and `{given.outputs_field}`"
        )
        also = [name for name in self._other_outputs if name not in ASIDE][:NAMED_MAX]
        others = f"; its outputs may also be in {', '.join(also)}" if also else ""
        return [Finding("api fields", "problem", says, "set these names" + others, changes=changes)]

    async def _find_limit(self, endpoint: Endpoint) -> Finding:
        """How many inputs it takes at once, up to `max_batch`: by doubling, and then by halving what is between."""
        max_batch = self._model.batching.max_batch
        largest, refused, give_up_at = min(2, max_batch), None, time.monotonic() + LIMIT_S_MAX
        low_enough = max_batch
        while largest < low_enough and time.monotonic() < give_up_at:
            size = min(2 * largest, max_batch) if refused is None else (largest + low_enough + 1) // 2
            tried = await self._call(endpoint, size)
            if not tried.fault:
                largest = size
                continue
            refused, low_enough = tried, size - 1
            if tried.refusal is not None and tried.refusal.batch_max is not None:
                largest = tried.refusal.batch_max
            if tried.answer is None or largest >= low_enough:
                break
        return check_limit(largest, refused, self._where, max_batch)


async def gather(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What comes of these, in their order; AT_ONCE of them at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(work: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await work

    return await asyncio.gather(*map(one, works))


async def connect(url: str, context: ssl.SSLContext | None = None) -> None:
    """Connect to where a URL leads, and leave; raises OSError, or ValueError for a name that can be none."""
    async with asyncio.timeout(CONNECT_S_MAX):
        if url.startswith("unix:"):
            _, writer = await asyncio.open_unix_connection(url.removeprefix("unix:").partition(":")[0])
        else:
            parsed = URL(url)
            _, writer = await asyncio.open_connection(parsed.host, port_of(parsed), ssl=context)
    writer.close()


def _with_fields(model: Model, inputs_field: str, outputs_field: str) -> Model:
    upstream = replace(model.upstream, inputs_field=inputs_field, outputs_field=outputs_field)
    return replace(model, upstream=upstream)


def _at(endpoint: Endpoint, finding: Finding) -> Finding:
    return replace(finding, where=(endpoint.name,))
