"""`carpool doctor` against real small APIs: what it says of each, and that what it says to paste works."""

import asyncio
import json
import socket
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from carpool.core.finding import LEVELS, Finding
from carpool.settings import Settings, models_of
from carpool.settings.schema import BatchingSettings, UpstreamSettings
from carpool.tools.api_doctor import ApiDoctor
from support.certificates import Certificates
from support.processes import carpool
from support.stream_server import StreamServer, stream_server
from support.upstreams import answer_bytes


def missing(*fields: str) -> dict[str, Any]:
    """FastAPI's body of a 422 for fields that are not there."""
    return {"detail": [{"loc": ["body", field], "msg": "Field required", "type": "missing"} for field in fields]}


class OddApi:
    """`POST path` with `{inputs_field: […]}` → `{outputs_field: […]}`; the outputs are the inputs' own text."""

    def __init__(self, **other: Any) -> None:
        self.path = "/predict"
        self.inputs_field = "sentences"
        self.outputs_field = "vectors"
        # Further fields that the API wants, and that it answers with.
        self.wants: tuple[str, ...] = ()
        self.adds: dict[str, Any] = {}
        # The type of one input.
        self.input_type: type = str
        self.batch_max = 1000
        # What it says when a batch is too large.
        self.limit_status, self.limit_words = 400, "too much"
        self.token = ""
        # What is answered in place of anything else.
        self.status: int | None = None
        self.latency_s = 0.0
        # The outputs for these inputs.
        self.compute: Callable[[list[Any]], object] = lambda inputs: [json.dumps(each) for each in inputs]
        # Without these, a wrong name is a 500, as it is where nobody checks.
        self.is_checked = True
        self.has_openapi = True
        self.calls: list[dict[str, Any]] = []
        self.server: StreamServer
        for name, value in other.items():
            assert name in vars(self), name
            setattr(self, name, value)

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    @property
    def url(self) -> str:
        """The address for `--upstream`."""
        return self.root + self.path

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: calls one after the other."""
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, target = head.split(" ")[:2]
            path = target.partition("?")[0]
            fields = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])
            }
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            status, said = await self.answer(method, path, fields.get("authorization", ""), body)
            writer.write(answer_bytes(said if isinstance(said, bytes) else json.dumps(said).encode(), status))
            await writer.drain()

    async def answer(self, method: str, path: str, authorization: str, body: bytes) -> tuple[int, Any]:
        """The status and the body of the answer to one request."""
        if path == "/openapi.json" and self.has_openapi:
            return 200, {"paths": {self.path: {"post": {}}, "/health": {"get": {}}}}
        if path != self.path:
            return 404, {"detail": "Not Found"}
        if method != "POST":
            return 405, {"detail": "Method Not Allowed"}
        if self.token and authorization != f"Bearer {self.token}":
            return 401, {"detail": "Not authenticated"}
        await asyncio.sleep(self.latency_s)
        if self.status is not None:
            return self.status, {"error": "it is what it is"}
        call = json.loads(body)
        self.calls.append(call)
        lacking = [field for field in (self.inputs_field, *self.wants) if field not in call]
        if lacking:
            return (422, missing(*lacking)) if self.is_checked else (500, b"Internal Server Error")
        inputs = call[self.inputs_field]
        for number, each in enumerate(inputs):
            if not isinstance(each, self.input_type):
                fault = {"loc": ["body", self.inputs_field, number], "msg": "wrong type", "type": "wrong_type"}
                return (422, {"detail": [fault]}) if self.is_checked else (500, b"Internal Server Error")
        if len(inputs) > self.batch_max:
            return self.limit_status, {"error": self.limit_words.format(size=len(inputs), max=self.batch_max)}
        return 200, {self.outputs_field: self.compute(inputs), **self.adds}


@asynccontextmanager
async def odd_api(api: OddApi | None = None, **options: Any) -> AsyncIterator[OddApi]:
    """One on a free port, or with `ssl`."""
    api = api or OddApi()
    async with stream_server(api.serve, **options) as api.server:
        yield api


async def examine(
    urls: str | Sequence[str], given: bytes = b"", *, max_batch: int = 64, **upstream: Any
) -> dict[str, Finding]:
    """The findings by the name of the check; of the gravest where there are several."""
    endpoints = [urls] if isinstance(urls, str) else list(urls)
    settings = Settings(
        upstream=UpstreamSettings(endpoints=endpoints, **upstream), batching=BatchingSettings(max_batch=max_batch)
    )
    said: list[str] = []
    findings = await ApiDoctor(settings, models_of(settings)["default"], given, said.append).examine()
    assert said, "long work shows what it does"
    return {finding.check: finding for finding in sorted(findings, key=lambda each: LEVELS.index(each.level))}


def changes(found: dict[str, Finding]) -> dict[str, Any]:
    return {path: value for finding in found.values() for path, value in finding.changes}


def problems(found: dict[str, Finding]) -> set[str]:
    return {check for check, finding in found.items() if finding.level == "problem"}


async def doctor(*arguments: str, cwd: Path) -> "tuple[int, str]":
    done = await asyncio.to_thread(lambda: carpool("doctor", *arguments, cwd=cwd))
    assert done.stderr == ""
    return done.returncode, done.stdout


# Names


async def test_an_api_that_is_well() -> None:
    async with odd_api(OddApi(inputs_field="inputs", outputs_field="outputs")) as api:
        found = await examine(api.url)
        assert problems(found) == set() and changes(found) == {}
        sizes = [len(call["inputs"]) for call in api.calls]
        assert sizes == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [("instances", "predictions"), ("input", "data"), ("texts", "embeddings"), ("input", "output"), ("inputs", "odd")],
)
async def test_the_usual_names_are_found(inputs: str, outputs: str, is_checked: bool) -> None:
    """Also where the API says nothing of names, but fails."""
    async with odd_api(OddApi(inputs_field=inputs, outputs_field=outputs, is_checked=is_checked)) as api:
        found = await examine(api.url)
    assert problems(found) == {"api fields"}
    assert changes(found) == {"upstream.inputs_field": inputs, "upstream.outputs_field": outputs}


async def test_other_names_are_read_from_fastapis_422_and_from_the_answer() -> None:
    api = OddApi(inputs_field="sentences", outputs_field="vectors", adds={"warnings": ["slow"], "took": 1})
    async with odd_api(api):
        found = await examine(api.url)
    assert problems(found) == {"api fields"}
    assert changes(found) == {"upstream.inputs_field": "sentences", "upstream.outputs_field": "vectors"}


async def test_an_input_that_no_doctor_guesses_is_asked_for() -> None:
    async with odd_api(OddApi(input_type=dict)) as api:
        found = await examine(api.url)
        assert problems(found) == {"api fields"}
        assert changes(found) == {"upstream.inputs_field": "sentences"}
        assert "--input" in found["api fields"].do and "wrong_type" in found["api fields"].heard
        given = await examine(api.url, b'{"id": 7}', inputs_field="sentences", outputs_field="vectors")
        assert problems(given) == set()
        assert {"id": 7} in api.calls[-1]["sentences"]


# Outputs, batches, time


async def test_a_number_of_outputs_that_is_not_that_of_the_inputs() -> None:
    api = OddApi(inputs_field="inputs", outputs_field="outputs", compute=lambda inputs: ["only one"])
    async with odd_api(api):
        found = await examine(api.url)
        assert problems(found) == {"api outputs"}
        assert "1 outputs came for 2 inputs" in found["api outputs"].says
        assert changes(found) == {"batching.max_batch": 1}
        assert problems(await examine(api.url, max_batch=1)) == set()


async def test_a_call_of_two_that_is_refused() -> None:
    async with odd_api(OddApi(inputs_field="inputs", outputs_field="outputs", batch_max=1)) as api:
        found = await examine(api.url)
    assert problems(found) == {"api batch"} and changes(found) == {"batching.max_batch": 1}


@pytest.mark.parametrize("batch_max", [2, 3, 12, 63])
@pytest.mark.parametrize("words", ["too much", "batch size {size} > maximum {max}"])
async def test_the_batch_limit_is_found(batch_max: int, words: str) -> None:
    api = OddApi(inputs_field="inputs", outputs_field="outputs", batch_max=batch_max, limit_words=words)
    async with odd_api(api):
        found = await examine(api.url)
    assert found["api batch"].level == ("problem" if words == "too much" else "warning")
    assert changes(found) == {"batching.max_batch": batch_max}


# The way to it


async def test_a_path_that_is_not_there_and_what_else_is_wrong() -> None:
    async with odd_api() as api:
        found = await examine(api.root + "/infer")
        assert problems(found) == {"api path", "api fields"}
        assert "404" in found["api path"].says and "/predict" in found["api path"].do
        assert changes(found)["upstream.endpoints"] == (api.url,)
        api.has_openapi = False
        silent = await examine(api.root + "/infer")
        assert problems(silent) == {"api path"} and changes(silent) == {}


async def test_credentials(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("canary-of-a-token")
    async with odd_api(OddApi(inputs_field="inputs", outputs_field="outputs", token="another")) as api:
        without = await examine(api.url)
        assert problems(without) == {"api credentials"} and "upstream.token_file" in without["api credentials"].do
        wrong = await examine(api.url, token_file=str(token))
        assert "does not accept" in wrong["api credentials"].says and "canary" not in str(wrong)
        api.token = "canary-of-a-token"
        assert problems(await examine(api.url, token_file=str(token))) == set()


async def test_secrets_are_not_shown_even_if_the_api_repeats_them(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("canary-of-a-token")
    api = OddApi(compute=lambda inputs: "no array", adds={"echo": "Bearer canary-of-a-token"})
    async with odd_api(api):
        (tmp_path / "carpool.toml").write_text('[upstream]\ntoken_file = "token"\n')
        status, said = await doctor("--upstream", api.url + "?key=canary", cwd=tmp_path)
    assert status == 1 and "echo" in said and "canary" not in said


async def test_a_port_that_refuses_and_a_name_that_does_not_resolve() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        port = bound.getsockname()[1]
        refused = await examine(f"http://127.0.0.1:{port}/x")
    assert problems(refused) == {"api port"} and f"127.0.0.1:{port} refuses" in refused["api port"].says
    unknown = await examine("http://nobody.invalid:9/x")
    assert problems(unknown) == {"api name"} and "nobody.invalid does not resolve" in unknown["api name"].says


async def test_tls(certificates: Certificates) -> None:
    api = OddApi(inputs_field="inputs", outputs_field="outputs")
    async with odd_api(api):
        secure = api.url.replace("http", "https")
        found = await examine(secure)
        assert problems(found) == {"api tls"} and "write http://" in found["api tls"].do
    async with odd_api(api, ssl=certificates.of_server()):
        found = await examine(api.url)
        assert problems(found) == {"api tls"} and "write https://" in found["api tls"].do
        secure = api.url.replace("http", "https")
        found = await examine(secure)
        assert problems(found) == {"api tls"} and "upstream.tls_ca" in found["api tls"].do
        assert problems(await examine(secure, tls_ca=certificates.pem("ca"))) == set()
    async with odd_api(api, ssl=certificates.of_server(asks_for_client=True)):
        found = await examine(api.url.replace("http", "https"), tls_ca=certificates.pem("ca"))
        assert problems(found) <= {"api tls", "api answer"}
        assert "upstream.tls_cert" in next(finding.do for finding in found.values())
    async with odd_api(api, ssl=certificates.of_server("elsewhere")):
        found = await examine(api.url.replace("http", "https"), tls_ca=certificates.pem("ca"))
        assert "another name" in found["api tls"].says


async def test_each_of_several_endpoints_is_asked_and_those_that_differ_are_named() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{bound.getsockname()[1]}/predict"
        async with odd_api() as first, odd_api() as second, odd_api(OddApi(status=503)) as busy:
            found = await examine([dead, busy.url, first.url, second.url])
            assert found["api port"].where == (dead,)
            assert found["api answer"].where == (busy.url,)
            assert [len(call["sentences"]) for call in second.calls] == [1, 2]
    assert changes(found) == {"upstream.inputs_field": "sentences", "upstream.outputs_field": "vectors"}


# The command


async def test_what_is_printed_works_when_pasted(tmp_path: Path) -> None:
    api = OddApi(batch_max=8)
    async with odd_api(api):
        status, said = await doctor("--upstream", api.url, cwd=tmp_path)
        assert status == 1
        assert said.splitlines()[0].startswith("problem: api fields: ")
        pasted = said.partition(":\n\n[")[2].partition("\n\nThen ")[0]
        (tmp_path / "carpool.toml").write_text("[" + pasted)
        assert tomllib.loads("[" + pasted)["upstream"]["inputs_field"] == "sentences"
        status, said = await doctor(cwd=tmp_path)
        assert status == 0, said
        assert all(line.startswith("ok: ") for line in said.splitlines())


async def test_what_the_api_says_is_shown_to_people_and_not_to_programs(tmp_path: Path) -> None:
    async with odd_api(OddApi(status=500)) as api:
        status, said = await doctor("--upstream", api.url, cwd=tmp_path)
        assert status == 1 and "it is what it is" in said
        status, said = await doctor("--upstream", api.url, "--json", cwd=tmp_path)
        assert status == 1 and "it is what it is" not in said
        assert json.loads(said)["status"] == "problem"


async def test_each_model_is_asked_and_named(tmp_path: Path) -> None:
    async with odd_api(OddApi(inputs_field="inputs", outputs_field="outputs", batch_max=1)) as api:
        (tmp_path / "carpool.toml").write_text(
            f'[models.a]\nendpoints = ["{api.url}"]\n[models."org/b"]\nendpoints = ["sim:?latency_ms=1"]\n'
        )
        status, said = await doctor("--json", cwd=tmp_path)
    report = json.loads(said)
    levels = {(each["where"][0], each["check"]): each["level"] for each in report["findings"]}
    assert status == 1 and report["changes"] == {"models.a.max_batch": 1}
    assert (levels["model a", "api batch"], levels["model org/b", "api batch"]) == ("problem", "ok")


def test_exit_status_2_is_for_the_command_line(tmp_path: Path) -> None:
    for arguments in ([], ["--upstream", "sim:", "--input", "{"], ["--upstream", "ftp://x"]):
        done = carpool("doctor", *arguments, cwd=tmp_path)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    helped = carpool("doctor", "--help").stdout
    assert "Exit status: 0" in helped
