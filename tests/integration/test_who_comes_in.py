"""Who may come in, on real processes: keys that come and go, tokens, attacks."""

import asyncio
import json
import re
import textwrap
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from joserfc.jwk import OctKey

from support.client import Connection, Response, ask_once, inference_body
from support.grpc_client import grpc_client, message
from support.processes import GatewayProcess, carpool, running_gateway, running_role, start_gateway, until
from support.redis_servers import RedisServer, running_redis
from support.stream_server import stream_server
from support.tokens import SECRET, Signers, encode, good_claims, token_of

SIM = "sim:?latency_ms=1&slots=64"
KEYS = {"auth.mode": "keys", "limits.per_minute": 0}
ASYNC = "Prefer: respond-async\r\n"


def bearer(credential: str) -> str:
    return f"Authorization: Bearer {credential}\r\n"


async def ask(port: int, headers: str, text: str = "abc") -> Response:
    return await ask_once(port, "POST", "/v1/inference", inference_body(text), headers)


async def status(port: int, headers: str) -> int:
    return (await ask(port, headers)).status


async def keys(*arguments: str, **environment: str) -> str:
    """What `carpool keys` prints, which works."""
    done = await asyncio.to_thread(lambda: carpool("keys", *arguments, **environment))  # type: ignore[arg-type]
    assert done.returncode == 0, done
    return done.stdout.strip()


def without_id(response: Response) -> tuple[int, str, dict[str, object]]:
    problem = response.json
    assert problem.pop("request_id")
    return response.status, response.headers["www-authenticate"], problem


async def comes_in(port: int, headers: str, wanted: int = 200) -> None:
    """Wait until a credential gets this answer."""

    async def is_so() -> bool:
        return await status(port, headers) == wanted

    await until(is_so)


@asynccontextmanager
async def fleet(
    directory: Path, redis: RedisServer, settings: Mapping[str, object], gateways: int = 1
) -> AsyncIterator[list[GatewayProcess]]:
    """Gateways and a batcher over Redis, ready."""
    shared = {"broker.url": redis.url, "broker.namespace": directory.name, **settings}
    async with running_role(directory / "b", "batcher", "--upstream", SIM, settings=shared):
        running = [running_role(directory / f"g{n}", "gateway", settings=shared) for n in range(gateways)]
        started = [await each.__aenter__() for each in running]
        try:
            for gateway in started:
                await gateway.until_ready()
            yield started
        finally:
            for each in running:
                await each.__aexit__(None, None, None)


class TestKeys:
    async def test_a_key_comes_and_goes_while_the_gateway_runs(self, tmp_path: Path) -> None:
        async with running_gateway(tmp_path, SIM, settings=KEYS) as gateway:
            at = ("--data-dir", str(tmp_path))
            refused = await ask(gateway.port, "")
            assert refused.status == 401 and refused.headers["www-authenticate"] == "Bearer"
            key = await keys("create", "alice", "--tier", "paid", *at)
            assert key.startswith("cp_") and len(key) == 46
            await comes_in(gateway.port, bearer(key))
            assert await status(gateway.port, f"X-API-Key: {key}\r\n") == 200
            listed = await keys("list", *at)
            assert "alice" in listed and "paid" in listed and key not in listed
            await keys("revoke", "alice", *at)
            await comes_in(gateway.port, bearer(key), 401)
            # A connection that has shown one gets in no more than others.
            assert without_id(await ask(gateway.port, bearer(key))) == without_id(refused)
            assert key not in gateway.log.read_text()

    async def test_each_request_of_a_connection_shows_its_own(self, tmp_path: Path) -> None:
        first = await keys("create", "first", "--data-dir", str(tmp_path))
        async with running_gateway(tmp_path, SIM, settings=KEYS) as gateway:
            connection = await Connection.open(gateway.port)
            told = [
                (await connection.ask("POST", "/v1/inference", inference_body("x"), headers)).status
                for headers in (bearer(first), "", bearer(first), bearer("cp_other"), bearer(first))
            ]
            assert told == [200, 401, 200, 401, 200]
            await connection.close()

    async def test_over_redis_every_gateway_knows(self, tmp_path: Path, redis_server: RedisServer) -> None:
        where = {"CARPOOL_BROKER_URL": redis_server.url, "CARPOOL_BROKER_NAMESPACE": tmp_path.name}
        async with fleet(tmp_path, redis_server, KEYS, gateways=2) as gateways:
            key = await keys("create", "alice", **where)
            for gateway in gateways:
                await comes_in(gateway.port, bearer(key))
                assert await status(gateway.port, bearer("cp_" + "x" * 43)) == 401
            assert json.loads(await keys("list", "--json", **where))["keys"][0]["owner"] == "alice"
            await keys("revoke", "alice", **where)
            for gateway in gateways:
                await comes_in(gateway.port, bearer(key), 401)
        again = await asyncio.to_thread(lambda: carpool("keys", "revoke", "alice", cwd=None, **where))
        assert (again.returncode, again.stderr.count("\n")) == (1, 1)
        assert key not in str(await redis_server.ask("HGETALL", f"{tmp_path.name}:{{fleet}}:keys"))

    async def test_without_redis_what_is_known_stays(self, tmp_path: Path) -> None:
        async with running_redis(tmp_path / "redis") as redis:
            where = {"CARPOOL_BROKER_URL": redis.url}
            key = await keys("create", "alice", **where)
            settings = {**KEYS, "broker.url": redis.url}
            direct = ("--upstream", SIM)
            async with running_role(tmp_path / "g", "gateway", *direct, settings=settings) as gateway:
                await comes_in(gateway.port, bearer("cp_other"), 401)
                redis.kill()
                await comes_in(gateway.port, bearer(key))  # in direct mode
                assert await status(gateway.port, bearer("cp_other")) == 401
            unreachable = await asyncio.to_thread(lambda: carpool("keys", "list", cwd=None, **where))
            assert unreachable.returncode == 1 and "Redis cannot be reached" in unreachable.stderr
            # One that never saw the keys cannot say that a key is not valid.
            async with running_role(tmp_path / "new", "gateway", *direct, settings=settings) as gateway:
                unknown = await ask(gateway.port, bearer(key))
                assert (unknown.status, unknown.headers["retry-after"]) == (503, "1")
                assert await status(gateway.port, "") == 401

    async def test_keys_of_the_configuration_and_their_models(self, tmp_path: Path) -> None:
        def made(name: str, *options: str) -> tuple[str, str]:
            done = carpool("keys", "create", name, "--show-toml", *options, cwd=tmp_path)
            return done.stdout.strip(), done.stderr

        models = f"[models.a]\nendpoints = ['{SIM}']\n[models.b]\nendpoints = ['{SIM}']\n"
        (tmp_path / "carpool.toml").write_text(models)
        alice, alice_table = made("alice", "--models", "b")
        bob, bob_table = made("bob")
        (tmp_path / "carpool.toml").write_text(models + alice_table)
        async with running_gateway(tmp_path, "", settings=KEYS) as gateway:

            async def ask_for(model: str, key: str) -> Response:
                body = json.dumps({"model_id": model, "input_data": "x"}).encode()
                return await ask_once(gateway.port, "POST", "/v1/predict", body, bearer(key))

            assert (await ask_for("b", alice)).status == 200
            refused = await ask_for("a", alice)
            assert refused.status == 404 and refused.json["type"].endswith("unknown-model")
            task = await ask_once(gateway.port, "POST", "/v1/inference", inference_body("x"), bearer(alice) + ASYNC)
            assert task.status == 404  # the model meant is the first one
            assert task.json["detail"] == "this gateway serves b; name one of these"
            assert await status(gateway.port, bearer(bob)) == 401
            (tmp_path / "carpool.toml").write_text(models + bob_table)
            gateway.reload()
            await comes_in(gateway.port, bearer(bob))
            assert (await ask_for("b", alice)).status == 401
            assert not any("next start" in said for said in gateway.log_messages("warning"))


OWN = ("--models", "own", "--models", "own-tensors")


class TestModels:
    """A credential for some models cannot find out which others there are: to it they are as one that is not."""

    MODELS = """
        [gateway]
        grpc_port = 0
        [models.secret]
        endpoints = ['{sim}']
        [models.secret-tensors]
        endpoints = ['{sim}']
        protocol = "kserve_v2"
        [models.own]
        endpoints = ['{sim}']
        [models.own-tensors]
        endpoints = ['{sim}']
        protocol = "kserve_v2"
    """
    CALLS: tuple[tuple[str, str, dict[str, object]], ...] = (
        ("POST", "/v1/inference", {"model": "NAME", "input": "x"}),
        ("POST", "/v1/inference", {"model": "NAME", "input": "x", "mode": "async"}),
        ("POST", "/v1/predict", {"model_id": "NAME", "input_data": "x"}),
        ("POST", "/v1/embeddings", {"model": "NAME", "input": "x"}),
        ("POST", "/v1/embeddings", {"model": "NAME", "input": ["x", "y"], "other": 1}),
        ("POST", "/v1/completions", {"model": "NAME", "prompt": "x"}),
        ("POST", "/v1/models/NAME:predict", {"instances": ["x"]}),
        ("GET", "/v1/models/NAME", {}),
        ("GET", "/v2/models/NAME", {}),
        ("GET", "/v2/models/NAME/versions/1", {}),
        ("GET", "/v2/models/NAME/ready", {}),
        ("POST", "/v2/models/NAME/infer", {"inputs": []}),
    )

    async def test_they_are_as_unknown_as_those_that_are_not_there(self, tmp_path: Path) -> None:
        models = textwrap.dedent(self.MODELS.format(sim=SIM))
        (tmp_path / "carpool.toml").write_text(models)
        made = carpool("keys", "create", "alice", "--show-toml", *OWN, cwd=tmp_path)
        (tmp_path / "carpool.toml").write_text(models + made.stderr)
        key = bearer(made.stdout.strip())
        async with running_gateway(tmp_path, "", settings=KEYS) as gateway:

            async def answer(method: str, path: str, body: dict[str, object], name: str) -> tuple[int, str]:
                given = json.dumps(body).replace("NAME", name).encode() if body else b""
                found = await ask_once(gateway.port, method, path.replace("NAME", name), given, key)
                told = re.sub(rb'"request_id":"[^"]*"', b"", found.body).decode()
                return found.status, told.replace(name, "NAME")

            for call in self.CALLS:
                secret, nothing = await answer(*call, "secret"), await answer(*call, "absent")
                assert secret == nothing and secret[0] == 404 and "secret" not in secret[1], (call, secret, nothing)
                assert await answer(*call, "secret-tensors") == nothing
            # Where none is named, its own is meant, or it is told which it has.
            unnamed = await ask_once(gateway.port, "POST", "/v1/inference", inference_body("x"), key)
            assert unnamed.json["detail"] == "this gateway serves own, own-tensors; name one of these"
            for path in ("/v1/models", "/openapi.json", "/v2", "/v2/health/ready"):
                assert b"secret" not in (await ask_once(gateway.port, "GET", path, b"", key)).body
            assert (await ask_once(gateway.port, "POST", "/embed", b'{"inputs":"x"}', key)).status == 502  # no vector
            await asyncio.to_thread(self.over_grpc, gateway, key)

    def over_grpc(self, gateway: GatewayProcess, key: str) -> None:
        metadata = (("authorization", key.partition(": ")[2].strip()),)
        v2 = "inference.GRPCInferenceService/"
        with grpc_client(gateway.grpc_port) as client:
            for path, kind, field in (
                ("Predict", "PredictRequest", "model_id"),
                ("Submit", "SubmitRequest", ""),
                (v2 + "ModelMetadata", "inference.ModelMetadataRequest", "name"),
                (v2 + "ModelInfer", "inference.ModelInferRequest", "model_name"),
            ):
                refusals = []
                for name in ("secret", "secret-tensors", "absent"):
                    if field:
                        request = message(kind)(**{field: name})
                        if kind == "PredictRequest":
                            request.input_json = "1"
                    else:
                        request = message(kind)(request=message("PredictRequest")(model_id=name, input_json="1"))
                    refused = client.refused(path, request, metadata=metadata)
                    refusals.append((refused.code, refused.text))
                assert len(set(refusals)) == 1 and refusals[0][0] == "NOT_FOUND" and "secret" not in refusals[0][1]
            ready = client.method(v2 + "ModelReady")
            asked = message("inference.ModelReadyRequest")
            assert [
                ready(asked(name=name), metadata=metadata, timeout=60).ready
                for name in ("secret-tensors", "own-tensors")
            ] == [False, True]


class TestTokens:
    async def test_the_file_is_read_again_and_a_broken_one_is_not_used(self, tmp_path: Path) -> None:
        file = tmp_path / "keys.json"
        old, new = Signers(), Signers()
        file.write_bytes(old.key_set(old.ec))
        settings = {"auth.mode": "jwt", "auth.jwt_file": file, "limits.per_minute": 0}
        async with running_gateway(tmp_path, SIM, settings=settings) as gateway:
            tokens = [bearer(token_of(each.ec, header={"kid": "ec-1"})) for each in (old, new)]
            assert [await status(gateway.port, each) for each in tokens] == [200, 401]
            file.write_bytes(b'{"keys": [')
            await until(lambda: len(gateway.log_messages("error")) == 1)
            page = b"<html>502 Bad Gateway: try again in a moment</html>"
            file.write_bytes(page)
            await until(lambda: len(gateway.log_messages("error")) == 2)
            tokens.append(bearer(token_of(page)))  # signed with what everybody may read
            assert [await status(gateway.port, each) for each in tokens] == [200, 401, 401]
            file.write_bytes(new.key_set(new.ec))
            await comes_in(gateway.port, tokens[1])
            assert await status(gateway.port, tokens[0]) == 401  # though it was known
            assert len(gateway.log_messages("error")) == 2

    async def test_s6_every_attack_gets_the_same_401_and_nothing_is_fetched(self, tmp_path: Path) -> None:
        signers, own = Signers(), Signers()
        file = tmp_path / "keys.json"
        file.write_bytes(signers.key_set(signers.rsa, signers.ec))
        api_key = await keys("create", "alice", "--data-dir", str(tmp_path))
        called: list[int] = []

        async def trap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.append(1)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        async with stream_server(trap) as server:
            url = f"http://127.0.0.1:{server.port}/keys"
            pem = signers.rsa.as_pem(private=False)
            unsigned = encode(b'{"alg":"none"}') + b"." + encode(json.dumps(good_claims()).encode()) + b"."
            good = token_of(signers.rsa, header={"kid": "rsa-1"})
            named = {"kid": "rsa-1"}
            # One of each kind; tests/unit/test_tokens.py has all of them.
            attacks = {
                "nothing": "",
                "another scheme": f"Authorization: Basic {good}\r\n",
                "not signed": bearer(unsigned.decode()),
                "the public key as a secret (PEM)": bearer(token_of(OctKey(pem, pem), None, named, "HS256")),
                "says RS256, signed with HS256": bearer(
                    token_of(OctKey(pem, pem), None, {**named, "alg": "RS256"}, "HS256")
                ),
                "a plain secret": bearer(token_of(SECRET, None, named)),
                "kid is a path": bearer(token_of(SECRET, None, {"kid": "../../../../dev/null"})),
                "no kid": bearer(token_of(own.rsa)),
                "jku": bearer(token_of(own.rsa, None, {"kid": "other", "jku": url})),
                "jwk": bearer(token_of(own.rsa, None, {**named, "jwk": own.rsa.as_dict(private=False)})),
                "crit": bearer(token_of(signers.rsa, None, {**named, "crit": ["exp"]})),
                "over": bearer(token_of(signers.rsa, good_claims(exp=1), named)),
                "no sub": bearer(token_of(signers.rsa, good_claims(sub=None), named)),
                "another audience": bearer(token_of(signers.rsa, good_claims(iss="us", aud="them"), named)),
                "9 KB": bearer(token_of(signers.rsa, good_claims(more="x" * 7000), named)),
                "a token as an API key": f"X-API-Key: {good}\r\n",
                "two API keys": f"X-API-Key: {api_key}\r\nX-API-Key: {api_key}\r\n",
                "both headers": f"X-API-Key: {api_key}\r\n" + bearer(api_key),
            }
            settings = {
                "auth.mode": "both",
                "auth.jwt_file": file,
                "auth.jwt_issuer": "us",
                "auth.jwt_audience": "carpool",
                "limits.per_minute": 0,
            }
            async with running_gateway(tmp_path, SIM, "--log-level", "debug", settings=settings) as gateway:
                port = gateway.port
                meant = token_of(signers.rsa, good_claims(iss="us", aud=["carpool"]), {**named, "jku": url, "x5u": url})
                assert await status(port, bearer(meant)) == 200
                assert await status(port, bearer(api_key)) == 200
                told = {name: without_id(await ask(port, headers)) for name, headers in attacks.items()}
                assert set(map(repr, told.values())) == {repr(told["nothing"])}, told
                assert told["nothing"][0] == 401
                # What the face itself refuses, before anybody looks at a credential: 100 KB, and two of them.
                long = await ask(port, bearer(token_of(signers.rsa, good_claims(more="x" * 75_000), named)))
                twice = await ask(port, bearer(meant) * 2)
                assert (long.status, twice.status) == (431, 400)
                # The same on every path that shows something of somebody.
                for method, target in (("GET", "/v1/result/" + "0" * 32), ("DELETE", "/v1/result/" + "0" * 32)):
                    refused = await ask_once(port, method, target, b"", attacks["no kid"])
                    assert without_id(refused) == told["nothing"]
                    assert (await ask_once(port, method, target, b"", bearer(api_key))).status == 404
                seen = gateway.log.read_text()
                for secret in (api_key, meant, meant.split(".")[2], good.split(".")[2]):
                    assert secret not in seen
        assert called == []


async def test_listening_beyond_loopback_without_credentials_is_said(tmp_path: Path) -> None:
    for mode, is_said in (("off", True), ("keys", False)):
        gateway = start_gateway(tmp_path / mode, SIM, ["--host", "0.0.0.0"], {"auth.mode": mode})
        try:
            await until(lambda log=gateway.log: "serving on" in log.read_text())
            assert any("may come in" in said for said in gateway.log_messages("warning")) is is_said
        finally:
            gateway.kill()
