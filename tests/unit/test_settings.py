"""The loader: precedence, every refusal in one line, and a dump that loads back."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carpool.composition.process import changed_for_the_next_start
from carpool.composition.tracing import resource_of
from carpool.core.names import Role
from carpool.service import IN_FLIGHT_BYTES_MAX, addresses
from carpool.settings import (
    ConfigError,
    Settings,
    admin_port,
    broker_address,
    checks,
    dump_toml,
    load_settings,
    models_of,
    require_for,
    require_upstream,
    warnings_of,
)
from carpool.settings.keys import FLAGS, KEYS, VARIABLES, model_keys, section_keys
from carpool.settings.resolution import ENDPOINTS_MAX, expand_endpoints
from carpool.settings.schema import TierSettings
from carpool.upstream.fleet import Address
from carpool.upstream.load import parse_load_source
from carpool.upstream.tls import UpstreamSecurity


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(
    flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, toml: str | None = None
) -> Settings:
    if toml is not None:
        Path("carpool.toml").write_text(toml, encoding="utf-8")
    return load_settings(flags or {}, environ=env or {}, file=None)


def refusal(
    flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, toml: str | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags, env, toml)
    text = str(caught.value)
    assert "\n" not in text
    return text


class TestBatchBytes:
    def test_one_batch_fits_among_those_that_run(self) -> None:
        most = IN_FLIGHT_BYTES_MAX
        assert load(toml=f"[batching]\nbatch_bytes_max = {most}").batching.batch_bytes_max == most
        for table in ("batching", "models.a"):
            told = refusal(toml=f"[{table}]\nbatch_bytes_max = {most + 1}")
            assert told.startswith(f"{table}.batch_bytes_max (carpool.toml) must be a whole number from 1 to {most}")


class TestSlots:
    def test_a_number_or_to_be_found(self) -> None:
        assert load().upstream.slots == 1
        assert load(toml="[upstream]\nslots = 4").upstream.slots == 4
        assert load({"upstream.slots": "4"}, {"CARPOOL_UPSTREAM_SLOTS": "auto"}).upstream.slots == 4
        assert load(env={"CARPOOL_UPSTREAM_SLOTS": "auto"}).upstream.slots == "auto"
        found = load(toml='[upstream]\nendpoints = ["http://a:1/x"]\nslots = "auto"')
        assert 'slots = "auto"' in dump_toml(found)
        assert addresses(models_of(found)["default"]) == [Address("http://a:1/x", None)]


class TestTrustedProxies:
    def test_addresses_and_networks(self) -> None:
        named = ["10.1.2.3", "10.0.0.0/8", "2001:db8::/32", "::1", "::ffff:10.0.0.0/104"]
        assert load(env={"CARPOOL_GATEWAY_TRUSTED_PROXIES": ",".join(named)}).gateway.trusted_proxies == named

    @pytest.mark.parametrize(
        "text", ["proxy.example", "10.0.0.0/33", "10.0.0", "10.0.0.1:80", "", "10.0.0.0/255.0.0.1"]
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        told = refusal(toml=f'[gateway]\ntrusted_proxies = ["10.0.0.1", "{text}"]')
        assert told.startswith("gateway.trusted_proxies (carpool.toml) must have addresses or networks like")
        assert told.endswith(f"not '{text}'")

    def test_an_address_with_the_bits_of_a_network(self) -> None:
        """It may be meant as the one or the other, and the one trusts 16 million more."""
        told = refusal(toml='[gateway]\ntrusted_proxies = ["10.1.2.3/8"]')
        assert "not '10.1.2.3/8': the address goes on behind" in told

    @pytest.mark.parametrize("text", ["0.0.0.0/0", "::/0", "::ffff:0.0.0.0/96"])
    def test_not_everybody_can_be_a_proxy(self, text: str) -> None:
        assert "nobody is a client" in refusal(toml=f'[gateway]\ntrusted_proxies = ["{text}"]')


class TestOrigins:
    def test_pages_of_these_may_ask(self) -> None:
        named = ["https://app.example.com", "http://localhost:3000", "http://[::1]:80", "*"]
        assert load().gateway.cors_origins == []
        assert load(env={"CARPOOL_GATEWAY_CORS_ORIGINS": ",".join(named)}).gateway.cors_origins == named

    @pytest.mark.parametrize(
        "text", ["app.example.com", "https://a/", "https://a/b", "null", "", "https://*.a", "ftp://a"]
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        told = refusal(toml=f'[gateway]\ncors_origins = ["{text}"]')
        assert told.startswith(
            "gateway.cors_origins (carpool.toml) must be a list of origins like https://app.example.com"
        )


class TestPrecedence:
    def test_flags_over_environment_over_file_over_defaults(self) -> None:
        toml = "[gateway]\nport = 1001\nhost = 'file'\nidle_timeout_s = 9\n[batching]\nmax_batch = 7"
        env = {"CARPOOL_GATEWAY_PORT": "1002", "CARPOOL_GATEWAY_HOST": "env"}
        settings = load({"gateway.port": 1003, "gateway.host": None}, env, toml)
        assert settings.gateway.port == 1003
        assert settings.gateway.host == "env"
        assert settings.gateway.idle_timeout_s == 9
        assert settings.batching.max_batch == 7
        assert settings.gateway.receive_timeout_s == 10.0

    def test_every_key_can_be_set_by_a_variable_of_its_own(self) -> None:
        assert len(VARIABLES) == len(KEYS)
        assert set(FLAGS) <= set(KEYS)


class TestRefusals:
    @pytest.mark.parametrize(
        ("toml", "parts"),
        [
            ("[gateway]\nprot = 1", ["gateway.prot (carpool.toml)", "did you mean gateway.port?"]),
            ("port = 1", ["port (carpool.toml)", "did you mean gateway.port?"]),
            ("[gateway]\nmax_batch = 1", ["did you mean batching.max_batch?"]),
            ("[gatway]\nport = 1", ["gatway", "did you mean gateway?"]),
            ("[upstream]\nendpoint = 'http://a:1'", ["did you mean upstream.endpoints?"]),
            ("[upstream]\nprobe_input = 'hello'", ["upstream.probe_input (carpool.toml) must be JSON"]),
            ('"a\\nb" = 1', [r"'a\nb'", "not a known key"]),
            ("gateway = 1", ["gateway (carpool.toml) must be a table"]),
            ("[gateway]\nport = '80'", ["gateway.port (carpool.toml) must be a whole number", "not '80'"]),
            ("[gateway]\nport = 70000", ["gateway.port (carpool.toml)", "from 0 to 65535, not 70000"]),
            ("[gateway]\nport = true", ["gateway.port", "not True"]),
            ("[gateway.port]\nx = 1", ["gateway.port", "a whole number"]),
            ("[gateway]\nidle_timeout_s = inf", ["gateway.idle_timeout_s", "above 0 and at most"]),
            ("[gateway]\nidle_timeout_s = nan", ["gateway.idle_timeout_s", "above 0 and at most"]),
            ("[broker]\ntotal_timeout_s = 0", ["broker.total_timeout_s", "above 0"]),
            (
                "[batching]\npolicy = 'eager'",
                ['batching.policy (carpool.toml) must be "adaptive", "fixed" or'],
            ),
            ("[upstream]\nendpoints = 'http://a'", ["upstream.endpoints (carpool.toml) must be a list"]),
            ("[upstream]\nendpoints = [1]", ["upstream.endpoints (carpool.toml) must be a list"]),
            ("[upstream]\ninputs_field = ''", ["upstream.inputs_field", "not empty"]),
            ("[upstream]\ninputs_field = 'parameters'", ["upstream.parameters_field must differ"]),
            ("[gateway]\nhost = '''a\nb'''", ["gateway.host (carpool.toml)", "without control characters"]),
            ("tiers = []", ["tiers (carpool.toml) must be at least one"]),
            ("tiers = [1]", ["tiers[0] (carpool.toml) must be a table"]),
            ("[[tiers]]\nname = 'a'", ["tiers[0].target_ms (carpool.toml) is missing", "a number from 0"]),
            ("[[tiers]]\nname = 'a'\ntarget_ms = 1\ntarget = 2", ["did you mean tiers[0].target_ms?"]),
            ("[[tiers]]\nname = ''\ntarget_ms = 1", ["tiers[0].name (carpool.toml)", "letters"]),
            ("[[tiers]]\nname='a'\ntarget_ms=1\n" * 2, ["tiers[1].name", "two tiers called a"]),
            ("[models.a]\nslot = 1", ["models.a.slot (carpool.toml)", "did you mean models.a.slots?"]),
            ("[models.a]\nslots = 0", ["models.a.slots (carpool.toml)", 'from 1 to 65536 or "auto", not 0']),
            ("[upstream]\nslots = 'many'", ['a whole number from 1 to 65536 or "auto", not']),
            ("[models.'a b']", ["models.'a b' (carpool.toml)", "letters, digits"]),
            ("[models]\na = 1", ["models.a (carpool.toml) must be a table"]),
            ("[models.a]\nendpoints = ['x']", ["models.a.endpoints (carpool.toml) has 'x'"]),
            ("model = 'b'\n[models.a]", ["model (carpool.toml) must be one of the configured: a"]),
            ("model = 'a b'", ["model (carpool.toml)", "letters, digits"]),
            ("[gateway\nport = 1", ["carpool.toml is not valid TOML", "line 1"]),
            ("[tasks]\ndata_dir = ''", ["tasks.data_dir (carpool.toml) must name a directory"]),
            ("[gateway]\nport = 9\nadmin_port = 9", ["gateway.admin_port (carpool.toml) must differ"]),
            ("[gateway]\nport = 65535", ["gateway.port (carpool.toml)", "give gateway.admin_port"]),
            ("[gateway]\nport = 9\ngrpc_port = 9", ["gateway.grpc_port (carpool.toml)", "another face"]),
            ("[gateway]\nport = 9\ngrpc_port = 10", ["gateway.grpc_port (carpool.toml)", "another face"]),
        ],
    )
    def test_in_the_file(self, toml: str, parts: list[str]) -> None:
        text = refusal(toml=toml)
        for part in parts:
            assert part in text

    @pytest.mark.parametrize(
        ("env", "parts"),
        [
            ({"CARPOOL_GATEWAY_PROT": "1"}, ["CARPOOL_GATEWAY_PROT", "did you mean CARPOOL_GATEWAY_PORT?"]),
            ({"CARPOOL_PORT": "80"}, ["CARPOOL_PORT (environment)", "did you mean CARPOOL_GATEWAY_PORT?"]),
            ({"CARPOOL_CONFIGURATION": "x"}, ["did you mean CARPOOL_CONFIG?"]),
            ({"CARPOOL_ZZZZZZ": "x"}, ["CARPOOL_ZZZZZZ", "docs/configuration.md"]),
            ({"CARPOOL_TIERS": "x"}, ["CARPOOL_TIERS", "file only"]),
            ({"CARPOOL_MODELS_A_SLOTS": "1"}, ["CARPOOL_MODELS_A_SLOTS", "file only"]),
            ({"CARPOOL_GATEWAY_PORT": "abc"}, ["gateway.port (environment CARPOOL_GATEWAY_PORT)", "'abc'"]),
            ({"CARPOOL_GATEWAY_PORT": ""}, ["gateway.port (environment CARPOOL_GATEWAY_PORT)", "''"]),
            ({"CARPOOL_TASKS_JOURNAL": "yes"}, ["tasks.journal", "true or false", "'yes'"]),
            ({"CARPOOL_UPSTREAM_TIMEOUT_S": "inf"}, ["upstream.timeout_s", "at most"]),
            ({"CARPOOL_GATEWAY_HOST": "a\udc80"}, ["gateway.host", "without control characters"]),
            ({"CARPOOL_CONFIG": "absent.toml"}, ["absent.toml", "no such configuration file"]),
            ({"CARPOOL_CONFIG": "."}, ["cannot be read"]),
        ],
    )
    def test_in_the_environment(self, env: dict[str, str], parts: list[str]) -> None:
        text = refusal(env=env)
        for part in parts:
            assert part in text

    def test_in_the_flags(self) -> None:
        assert "gateway.port (flag --port) must be" in refusal({"gateway.port": "x"})
        assert "did you mean gateway.port?" in refusal({"gateway.prt": 1})

    def test_a_file_of_endless_nesting(self) -> None:
        assert "not valid TOML" in refusal(toml="a = " + "[" * 50_000)

    @pytest.mark.parametrize(
        "variables",
        [
            {"CARPOOL_SERVICE_HOST": "10.0.0.1", "CARPOOL_SERVICE_PORT_HTTP": "8000"},
            {"CARPOOL_PORT": "tcp://10.0.0.1:8000", "CARPOOL_PORT_8000_TCP_ADDR": "10.0.0.1"},
            {"CARPOOL_GATEWAY_PORT": "tcp://10.0.0.1:8000", "CARPOOL_GATEWAY_SERVICE_PORT": "8000"},
        ],
    )
    def test_what_kubernetes_adds_for_a_service_is_passed_over(self, variables: dict[str, str]) -> None:
        assert load(env=variables) == Settings()


class TestSecrets:
    TOKEN = {"CARPOOL_SERVICE_TOKEN": "hunter2,hunter1"}

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
    def test_loopback_needs_no_token(self, host: str) -> None:
        assert load({"gateway.admin_host": host}).gateway.admin_host == host

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "gateway.local"])
    def test_any_other_admin_host_needs_one(self, host: str) -> None:
        text = refusal({"gateway.admin_host": host})
        assert "gateway.admin_host (flag --admin-host)" in text and "service.token" in text
        assert load({"gateway.admin_host": host}, self.TOKEN).service.token == ["hunter2", "hunter1"]

    def test_a_secret_is_never_shown(self) -> None:
        assert "hunter" not in dump_toml(load(env=self.TOKEN))
        assert '# token = "***"' in dump_toml(load(env=self.TOKEN))
        assert "hunter" not in repr(load(env=self.TOKEN))
        assert "hunter" not in refusal(env={"CARPOOL_SERVICE_TOKEN": "hunter two"})
        assert "12345" not in refusal(toml="[service]\ntoken = 12345")
        assert "hunter" not in refusal(toml="service = 'hunter2'")

    @pytest.mark.parametrize("empty", ["", " ", ",", " , "])
    def test_an_empty_variable_takes_no_token_away(self, empty: str) -> None:
        variable = {"CARPOOL_SERVICE_TOKEN": empty}
        assert not load(env=variable).service.token
        assert load(env=variable, toml="[service]\ntoken = ['hunter2']").service.token == ["hunter2"]


class TestCredentials:
    DIGEST = "0123456789abcdef" * 4

    def test_a_key_of_the_configuration(self) -> None:
        toml = f"[keys.alice]\nsha256 = '{self.DIGEST.upper()}'\ntier = 'paid'\nmodels = ['default']\nper_minute = 7"
        key = load(toml=toml).keys["alice"]
        assert (key.tier, key.per_minute, key.burst) == ("paid", 7, None)

    @pytest.mark.parametrize(
        ("toml", "part"),
        [
            ("[keys.a]\ntier = 'paid'", "keys.a.sha256 (carpool.toml) is missing"),
            ("[keys.a]\nsha256 = 'cp_canary'", "keys.a.sha256 (carpool.toml) must be a SHA-256 in hex"),
            ("[keys.a]\nsha256 = ['cp_canary']", "keys.a.sha256 (carpool.toml) must be a SHA-256"),
            ("[keys]\na = 'cp_canary'", "keys.a (carpool.toml) must be a table"),
            ("keys = ['cp_canary']", "keys (carpool.toml) must be a table"),
            ("[keys.a]\nsha256 = '@'\nper_minute = 1_000_000_001", "keys.a.per_minute (carpool.toml) must be"),
            ("[limits]\nburst = 1_000_000_001", "limits.burst (carpool.toml) must be"),
            (
                "[keys.a]\nsha256 = '@'\ntier = 'gold'",
                "keys.a.tier (carpool.toml) must be one of enterprise, paid, free",
            ),
            ("[keys.a]\nsha256 = '@'\nmodels = ['n']", "keys.a.models (carpool.toml) has 'n'"),
            ("[keys.a]\nsha256 = '@'\nowner = '10.0.0.1'", "keys.a.owner (carpool.toml) must not be an address"),
            ("[keys.a]\nsha256 = '@'\nowner = 'jwt:ann'", "keys.a.owner (carpool.toml) must not begin with jwt:"),
            ("[keys.'127.0.0.1']\nsha256 = '@'", "keys.127.0.0.1.owner (carpool.toml) must not be an address"),
            ("[keys.a]\nsha256 = '@'\n[keys.b]\nsha256 = '@'", "keys.b.sha256 (carpool.toml) is that of keys.a too"),
            ("[auth]\nmode = 'jwt'", "auth.mode (carpool.toml) needs auth.jwt_file"),
            ("[auth]\nmode = 'both'\njwt_file = ['canary']", "auth.jwt_file (carpool.toml) must be text"),
            (
                "[auth]\nmode = 'both'\njwt_file = 'canary'",
                "auth.jwt_file (carpool.toml) must be a file with keys: No such",
            ),
            ("[auth]\nmode = 'jwt'\njwt_file = 'carpool.toml'\njwt_algorithms = ['none']", "not ['none']"),
            ("[auth]\nmode = 'jwt'\njwt_file = 'carpool.toml'\njwt_algorithms = ['ES256']", "neither a JSON"),
            ("[auth]\nmode = 'open'", '"off", "keys", "jwt" or "both"'),
        ],
    )
    def test_what_does_not_go(self, toml: str, part: str) -> None:
        told = refusal(toml=toml.replace("@", self.DIGEST))
        assert part in told and "canary" not in told

    def test_a_file_with_keys(self) -> None:
        toml = "[auth]\nmode = 'jwt'\njwt_file = 'secret'\njwt_algorithms = ['HS256']"
        Path("secret").write_text("xyz" * 11 + "\n")
        assert load(toml=toml).auth.jwt_file == "secret"
        Path("secret").write_text("canary")
        told = refusal(toml=toml)
        assert "at least 32 bytes" in told and "canary" not in told


class TestTls:
    @pytest.fixture
    def pair(self, tmp_path: Path) -> dict[str, str]:
        cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        subprocess.run([*command.split(), "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True)
        return {"gateway.tls_cert": str(cert), "gateway.tls_key": str(key)}

    def test_one_without_the_other(self) -> None:
        assert "gateway.tls_cert (flag --tls-cert) needs gateway.tls_key" in refusal({"gateway.tls_cert": "x"})
        assert "gateway.tls_key (flag --tls-key) needs gateway.tls_cert" in refusal({"gateway.tls_key": "x"})

    def test_a_file_that_is_not_there(self, pair: dict[str, str]) -> None:
        text = refusal(pair | {"gateway.tls_key": "absent.pem"})
        assert "gateway.tls_key (flag --tls-key) cannot be read: 'absent.pem': No such file" in text

    def test_a_file_that_is_no_key(self, pair: dict[str, str]) -> None:
        text = refusal(pair | {"gateway.tls_key": pair["gateway.tls_cert"]})
        assert (
            "gateway.tls_cert (flag --tls-cert) and gateway.tls_key (flag --tls-key) must be a PEM certificate" in text
        )


class TestUpstreamSecurity:
    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
        for name in ("one", "other"):
            files = ["-out", f"{name}.pem", "-keyout", f"{name}.key"]
            subprocess.run([*command.split(), *files], check=True, capture_output=True, cwd=tmp_path)
        Path("token").write_text("canary-token\n")
        Path("two-words").write_text("canary words")
        Path("two-lines").write_text("canary\nlines")
        Path("empty").write_text("\n")
        Path("long").write_text("x" * (1024 * 1024 + 1))
        os.mkfifo("pipe")

    def test_everything_at_once(self) -> None:
        settings = load(
            env={"CARPOOL_UPSTREAM_HEADER_FILES": "X-Api-Key=token, X-Words=two-words"},
            toml="[upstream]\nendpoints=['https://a/']\ntls_ca='other.pem'\ntls_cert='one.pem'\ntls_key='one.key'\n"
            "token_file='token'",
        )
        assert models_of(settings)["default"].security == UpstreamSecurity(
            ca="other.pem",
            cert="one.pem",
            key="one.key",
            token_file="token",
            header_files=(("X-Api-Key", "token"), ("X-Words", "two-words")),
        )
        assert load(toml=dump_toml(settings)) == settings
        assert "canary" not in dump_toml(settings)

    def test_a_model_has_the_last_word_and_pairs_stay_together(self) -> None:
        settings = load(
            toml="[upstream]\nendpoints=['https://a/']\ntls_ca='other.pem'\ntls_cert='one.pem'\ntls_key='one.key'\n"
            "token_file='token'\n[models.same]\n[models.off]\ntls_ca=''\ntls_cert=''\ntoken_file=''\n"
            "[models.own]\ntls_cert='other.pem'\ntls_key='other.key'\nheader_files=['X-Key=token']"
        )
        shared = UpstreamSecurity(ca="other.pem", cert="one.pem", key="one.key", token_file="token")
        found = {name: model.security for name, model in models_of(settings).items()}
        assert found == {
            "same": shared,
            "off": UpstreamSecurity(),
            "own": msgspec.structs.replace(
                shared, cert="other.pem", key="other.key", header_files=(("X-Key", "token"),)
            ),
        }

    @pytest.mark.parametrize(
        ("toml", "text"),
        [
            ("tls_cert='one.pem'", "upstream.tls_cert (carpool.toml) needs upstream.tls_key beside it"),
            ("tls_key='one.key'", "upstream.tls_key (carpool.toml) needs upstream.tls_cert beside it"),
            (
                "tls_cert='one.pem'\ntls_key='other.key'",
                "upstream.tls_key (carpool.toml) must be a PEM certificate and",
            ),
            ("tls_ca='no.pem'", "upstream.tls_ca (carpool.toml) cannot be read: 'no.pem': No such file"),
            ("tls_ca='one.key'", "upstream.tls_ca (carpool.toml) must be a PEM file with certificates"),
            ("tls_ca='.'", "upstream.tls_ca (carpool.toml) cannot be read: '.': Is a directory"),
            ("tls_ca='pipe'", "upstream.tls_ca (carpool.toml) cannot be read: 'pipe': not a regular file"),
            ("tls_ca='long'", "upstream.tls_ca (carpool.toml) cannot be read: 'long': longer than"),
            (
                "tls_ca='one.pem'\nendpoints=['http://a/', 'unix:/b', 'sim:']",
                "upstream.tls_ca (carpool.toml) is of no use",
            ),
            (
                "token_file='empty'",
                "upstream.token_file (carpool.toml) must be the path of a file with a token: the file",
            ),
            ("token_file='two-words'", "without spaces"),
            ("token_file='canary-token'", "upstream.token_file (carpool.toml) must be the path of a file"),
            (
                "header_files=['X-Key=two-lines']",
                "upstream.header_files (carpool.toml): no value for X-Key: the file must",
            ),
            ("header_files=['X-Key=absent']", "no value for X-Key: No such file"),
            ("header_files=['X-Key: canary']", "upstream.header_files (carpool.toml) must have entries like"),
            ("header_files=['X-Key=']", "must have entries like"),
            ("header_files=['=token']", "must have entries like"),
            ("header_files=['content-Length=token']", "must not set content-Length"),
            ("header_files=['X-A=token', 'x-a=token']", "sets x-a twice"),
            (
                "token_file='token'\nheader_files=['authorization=token']",
                "sets Authorization, and so does upstream.token",
            ),
            ("[models.a]\ntls_cert='one.pem'", "models.a.tls_cert (carpool.toml) needs models.a.tls_key beside it"),
            ("[models.a]\ntls_ca='no.pem'", "models.a.tls_ca (carpool.toml) cannot be read"),
            ("[models.a]\ntoken_file='no'", "models.a.token_file (carpool.toml) must be the path"),
            ("[models.a]\ntls_ca='one.pem'\nendpoints=['http://a/']", "models.a.tls_ca (carpool.toml) is of no use"),
            ("token_file='token'\n[models.a]\nheader_files=['Authorization=token']", "so does upstream.token_file"),
        ],
    )
    def test_what_cannot_be_used(self, toml: str, text: str) -> None:
        said = refusal(toml=f"[upstream]\n{toml}")
        assert text in said
        assert "canary" not in said

    def test_tls_for_one_of_several_models_is_enough(self) -> None:
        toml = "[upstream]\ntls_ca='one.pem'\n[models.a]\nendpoints=['http://a/']\n[models.b]\nendpoints=['https://b/']"
        assert load(toml=toml).upstream.tls_ca == "one.pem"


class TestEndpoints:
    @pytest.mark.parametrize(
        "text",
        [
            "http://127.0.0.1:9000/infer",
            "https://gpu.example/v1/models/m:predict?key=1",
            "http://[::1]:9000",
            "http://gpu",
            "sim:",
            "sim:?latency_ms=50&per_item_ms=0&slots=64",
            "unix:/run/model.sock",
            "grpcs://gpu:8001",
            "unix:/run/model-1.sock:/v1/models/m:predict?key=1",
        ],
    )
    def test_one_stands_for_itself(self, text: str) -> None:
        assert expand_endpoints([text]) == [text]

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("", "looks like"),
            ("127.0.0.1:9000", "looks like"),
            ("ftp://a/b", "looks like"),
            ("http://", "looks like"),
            ("http:///path", "looks like"),
            ("http://a b/", "looks like"),
            ("http://a:9000#x", "looks like"),
            ("http://a:x/", "looks like"),
            ("http://a:1-2-3/", "looks like"),
            ("http://user:pw@a/", "looks like"),
            ("http://a:0/", "1 to 65535"),
            ("http://a:65536/", "1 to 65535"),
            ("http://a:9-8/", "lower one first"),
            ("http://a:1-60000/", "more than 4096"),
            ("unix:", "looks like unix:/"),
            ("unix:model.sock:/infer", "looks like unix:/"),
            ("unix:///run/model.sock:infer", "looks like unix:/"),
            ("unix:/run/model.sock:/a b", "looks like unix:/"),
            ("unix:/run/" + "é" * 60, "at most 107 bytes"),
            ("sim:latency_ms=5", "looks like sim:?"),
            ("sim:?latency=5", "unknown key 'latency'"),
            ("sim:?slots=0", "slots=0 is not valid"),
            ("sim:?slots=", "slots= is not valid"),
            ("sim:?latency_ms=-1", "latency_ms=-1 is not valid"),
            ("sim:?latency_ms=inf", "latency_ms=inf is not valid"),
        ],
    )
    def test_what_is_no_endpoint(self, text: str, part: str) -> None:
        with pytest.raises(ConfigError) as caught:
            expand_endpoints([text])
        assert part in str(caught.value)
        assert "upstream.endpoints (flag --upstream)" in refusal({"upstream.endpoints": [text]})

    @pytest.mark.parametrize(
        ("toml", "where"),
        [
            ("[upstream]\nendpoints = ['grpc://a:1']", "upstream.endpoints"),
            (
                "[upstream]\nendpoints = ['grpc://a:1']\nprotocol='kserve_v2_grpc'\n[models.a]\nprotocol='json'",
                "upstream.",
            ),
            ("[models.a]\nendpoints = ['grpc://a:1']", "models.a.endpoints"),
        ],
    )
    def test_grpc_needs_a_protocol_that_speaks_it(self, toml: str, where: str) -> None:
        text = refusal(toml=toml)
        assert where in text and "has 'grpc://a:1': that needs protocol kserve_v2_grpc, not json" in text
        load(toml="[upstream]\nendpoints = ['grpc://a:1-3']\nprotocol='kserve_v2_grpc'\n[models.a]")

    @pytest.mark.parametrize(
        ("toml", "where"),
        [
            ("[gateway]\ngrpc_port = 0", "gateway.grpc_port (carpool.toml)"),
            ("[upstream]\nendpoints = ['grpc://a:1']\nprotocol = 'kserve_v2_grpc'", "upstream.protocol (carpool.toml)"),
        ],
    )
    def test_grpc_is_an_extra(self, toml: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "find_spec", lambda name: None)
        assert refusal(toml=toml) == f"{where} needs grpcio: pip install 'carpool[grpc]'"

    @pytest.mark.parametrize(("url", "scheme"), [("http://a:1", "grpc://"), ("https://a:1/x", "grpcs://")])
    def test_grpc_is_not_spoken_over_http(self, url: str, scheme: str) -> None:
        text = refusal(toml=f"[upstream]\nendpoints = ['{url}']\nprotocol='kserve_v2_grpc'")
        assert f"upstream.endpoints (carpool.toml) has '{url}': protocol kserve_v2_grpc needs {scheme}" in text

    def test_the_same_one_twice(self) -> None:
        with pytest.raises(ConfigError, match="names 'http://a:3/' twice"):
            expand_endpoints(["http://a:1-5/", "http://a:3/"])

    def test_the_most_there_may_be(self) -> None:
        ranges = [f"http://a:1-{ENDPOINTS_MAX // 2}/", f"http://b:1-{ENDPOINTS_MAX // 2}/"]
        assert len(expand_endpoints(ranges)) == ENDPOINTS_MAX
        with pytest.raises(ConfigError, match="more than 4096"):
            expand_endpoints([*ranges, "http://c/"])

    @pytest.mark.parametrize(
        "toml",
        [
            "[upstream]\nendpoints = ['sim:']",
            "[models.a]\nendpoints = ['sim:']",
            "[upstream]\nendpoints = ['sim:']\n[models.a]",
        ],
    )
    def test_an_upstream_is_there(self, toml: str) -> None:
        require_upstream(load(toml=toml))

    @pytest.mark.parametrize(
        ("toml", "part"),
        [
            ("", "try `carpool demo`"),
            ("[models.a]\nendpoints = ['sim:']\n[models.b]", "give --upstream"),
            ("[upstream]\nendpoints = ['sim:']\n[models.a]\nendpoints = []", "models.a.endpoints is empty"),
        ],
    )
    def test_an_upstream_is_missing(self, toml: str, part: str) -> None:
        with pytest.raises(ConfigError) as caught:
            require_upstream(load(toml=toml))
        assert part in str(caught.value)


class TestModels:
    def test_a_key_of_a_model_is_that_of_one_section(self) -> None:
        names = [key.name for key in model_keys("")]
        assert len(names) == len(set(names))

    def test_a_model_may_say_anything_of_its_sections(self) -> None:
        fields = "inputs_field = 'in'\npolicy = 'fixed'\ninput_bytes_max = 9\nattempts = 1"
        settings = load(toml=f"[upstream]\nendpoints = ['sim:']\n[models.a]\n{fields}\n[models.b]")
        a, b = models_of(settings).values()
        assert (a.upstream.inputs_field, a.batching.policy, a.input.input_bytes_max) == ("in", "fixed", 9)
        assert (a.upstream.attempts, a.upstream.outputs_field) == (1, "outputs")
        assert (b.upstream, b.batching, b.input) == (settings.upstream, settings.batching, settings.input)
        told = refusal(toml="[models.a]\ninputs_field = 'parameters'")
        assert told == "upstream.parameters_field must differ from inputs_field"

    @pytest.mark.parametrize(
        ("port", "admin", "expected"), [(8000, None, 8001), (0, None, 0), (8000, 9, 9), (8000, 0, 0)]
    )
    def test_the_port_for_operators(self, port: int, admin: int | None, expected: int) -> None:
        assert admin_port(load({"gateway.port": port, "gateway.admin_port": admin}).gateway) == expected


class TestLoad:
    @pytest.mark.parametrize(
        ("page", "metric"),
        [
            *((page, "m") for page in ("metrics", "8002/metrics", ":8002", "http://host", "ftp://h/m", "http://u@h/m")),
            *(("/m", metric) for metric in ("", "a b", "m/0", "m/x", "m/-1")),
        ],
    )
    def test_what_is_no_metric(self, page: str, metric: str) -> None:
        text = refusal(flags={"upstream.load": f"{page}#{metric}"})
        assert text.startswith("upstream.load (flag) must look like X-Load (a header), :8002/metrics#")

    @pytest.mark.parametrize(
        ("text", "source"),
        [
            (":8002/metrics#nv_gpu_utilization", (":8002/metrics", "nv_gpu_utilization", 1.0)),
            ("/metrics#vllm:num_requests_waiting/512", ("/metrics", "vllm:num_requests_waiting", 512.0)),
            ("https://host/m?a=b#m/0.5", ("https://host/m?a=b", "m", 0.5)),
        ],
    )
    def test_metrics(self, text: str, source: tuple[str, str, float]) -> None:
        assert parse_load_source(load({"upstream.load": text}).upstream.load) == source

    @pytest.mark.parametrize(
        ("toml", "part"),
        [
            ("[upstream]\nload = 'X Load'", "upstream.load (carpool.toml) must look like X-Load (a header)"),
            ("[models.a]\nload = '/m'", "models.a.load (carpool.toml) must look like"),
            ("[models.a]\nload = ':'", "models.a.load (carpool.toml) must look like X-Load"),
        ],
    )
    def test_what_does_not_go(self, toml: str, part: str) -> None:
        assert part in refusal(toml=toml)


class TestBroker:
    @pytest.fixture(autouse=True)
    def _files(self) -> None:
        Path("password").write_text("canary pass/word\n")
        Path("two-lines").write_text("canary\nlines\n")
        Path("empty").write_text("\n")
        Path("no-text").write_bytes(b"\xff\xfe")

    def test_the_password_may_be_in_a_file(self) -> None:
        settings = load({"broker.url": "redis://me@h"}, {"CARPOOL_BROKER_PASSWORD_FILE": "password"})
        address = broker_address(settings.broker)
        assert (address.username, address.password) == ("me", "canary pass/word")
        assert "canary" not in dump_toml(settings)

    @pytest.mark.parametrize(
        ("toml", "text"),
        [
            ("url = 'http://h'", "broker.url (carpool.toml) cannot be used: it must begin with one of redis://"),
            ("url = 'redis://me:canary@'", "broker.url (carpool.toml) cannot be used: a host is missing"),
            ("url = 'redis://:canary/@h'", "broker.url (carpool.toml) cannot be used: "),
            ("url = ['redis://:canary@h']", "broker.url (carpool.toml) must be text"),
            ("url = 'redis://h'\npassword_file = 'absent'", "broker.password_file (carpool.toml) must be the path of"),
            ("url = 'redis://h'\npassword_file = 'canary'", "with a password: No such file"),
            ("url = 'redis://h'\npassword_file = 'two-lines'", "the file must have one line"),
            ("url = 'redis://h'\npassword_file = 'empty'", "the file must have one line"),
            ("url = 'redis://h'\npassword_file = 'no-text'", "it is not text"),
            (
                "url = 'redis://:canary@h'\npassword_file = 'password'",
                "broker.url (carpool.toml) cannot be used: there",
            ),
            ("password_file = 'password'", "broker.password_file (carpool.toml) is of no use without broker.url"),
            ("tls_ca = 'x'", "broker.tls_ca (carpool.toml) is of no use without broker.url"),
            ("url = 'rediss://h'\ntls_ca = 'absent'", "broker.tls_ca (carpool.toml) cannot be read: 'absent'"),
            ("url = 'rediss://h'\ntls_ca = 'password'", "broker.tls_ca (carpool.toml) must be a PEM file"),
            ("url = 'rediss://h'\ntls_cert = 'x'", "broker.tls_cert (carpool.toml) needs broker.tls_key beside it"),
            ("url = 'redis://h'\ntls_ca = 'password'", "broker.url (carpool.toml) cannot be used: there are files for"),
            ("namespace = 'a{b}'", "broker.namespace (carpool.toml) must be 1 to 128 letters"),
            ("namespace = ''", "broker.namespace (carpool.toml) must be 1 to 128 letters"),
            ("replicas = 17", "broker.replicas (carpool.toml) must be a whole number from 0 to 16, not 17"),
            ("redis_timeout_ms = 5", "broker.redis_timeout_ms (carpool.toml) must be a whole number from 10"),
            ("shards = 8", "broker.shards (carpool.toml) is not a known key"),
        ],
    )
    def test_what_cannot_be_used(self, toml: str, text: str) -> None:
        said = refusal(toml=f"[broker]\n{toml}")
        assert text in said
        assert "canary" not in said

    @pytest.mark.parametrize(
        ("role", "flags", "part"),
        [
            ("serve", {"broker.url": "redis://h"}, "no upstream: give --upstream"),
            ("gateway", {"upstream.endpoints": ["sim:"]}, "no broker: give --broker redis://"),
            ("batcher", {"upstream.endpoints": ["sim:"]}, "no broker: give --broker redis://"),
            ("batcher", {"broker.url": "redis://h"}, "no upstream: give --upstream"),
        ],
    )
    def test_what_a_role_misses(self, role: Role, flags: dict[str, Any], part: str) -> None:
        with pytest.raises(ConfigError) as caught:
            require_for(role, load(flags))
        assert part in str(caught.value)

    def test_what_each_role_needs(self) -> None:
        require_for("serve", load({"upstream.endpoints": ["sim:"]}))
        require_for("gateway", load({"broker.url": "redis://h"}))
        for role in ("serve", "gateway", "batcher"):
            require_for(role, load({"broker.url": "redis://h", "upstream.endpoints": ["sim:"]}))

    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            ({}, "gateway.processes (flag --processes) above 1 needs a broker"),
            ({"broker.url": "redis://h", "gateway.processes": "65"}, "from 1 to 64"),
            (
                {"broker.url": "redis://h", "gateway.port": 65534},
                "needs as many admin ports from 65535 on as there are",
            ),
            (
                {"broker.url": "redis://h", "gateway.port": 9, "gateway.admin_port": 8},
                "gateway.port (flag --port) is one of the admin ports of the processes, 8 to 9",
            ),
        ],
    )
    def test_processes_that_do_not_go(self, flags: dict[str, Any], text: str) -> None:
        assert text in refusal({"gateway.processes": "2"} | flags)

    def test_processes_that_go(self) -> None:
        flags = {"broker.url": "redis://h", "gateway.processes": 64}
        for port in (0, 65535 - 64):
            assert load(flags | {"gateway.port": port}).gateway.processes == 64


class TestUrlsInTheDump:
    """A URL may hold a password, and its query string a key: neither is printed."""

    def test_a_broker_without_one_loads_back(self) -> None:
        settings = load({"broker.url": "redis+cluster://a:1,b:2", "gateway.processes": 3})
        assert load(toml=dump_toml(settings)) == settings

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("https://gpu/a@b?key=canary,canary&x='canary'", "https://gpu/a@b?***"),
            ("unix:/run/model.sock:/infer?key=canary", "unix:/run/model.sock:/infer?***"),
        ],
    )
    def test_a_query_string_of_an_endpoint(self, url: str, shown: str) -> None:
        endpoints = f'endpoints = ["{url}", "sim:?slots=4"]'
        dump = dump_toml(load(toml=f"[upstream]\n{endpoints}\n[models.a]\n{endpoints}"))
        assert dump.count(f'\n# endpoints = ["{shown}", "sim:?slots=4"]\n') == 2
        assert "canary" not in dump
        assert "endpoints" not in tomllib.loads(dump)["upstream"] | tomllib.loads(dump)["models"]["a"]

    def test_nor_is_either_in_an_error(self) -> None:
        for url in ("ftp://gpu/x?key=canary", "http://me:can/ary@gpu/", "http://gpu:0/x?key=canary"):
            text = refusal({"upstream.endpoints": [url]})
            assert "has '" in text and "canary" not in text and "can/ary" not in text


class TestDump:
    FULL = """
        model = "a"
        [gateway]
        host = "ünï \\"quoted\\" \\\\ path"
        admin_port = 9
        [batching]
        max_wait_ms = 0.1
        [upstream]
        endpoints = ["http://a:1-3/x", "sim:?slots=4"]
        [tasks]
        journal = false
        [[tiers]]
        name = "only"
        target_ms = 12.5
        [models.a]
        [models."b/c:1.0"]
        endpoints = ["https://b/"]
        protocol = "kserve_v1"
        timeout_s = 30
    """

    @pytest.mark.parametrize("toml", ["", FULL])
    def test_it_loads_back_to_the_same_settings(self, toml: str) -> None:
        settings = load(toml=toml)
        assert load(toml=dump_toml(settings)) == settings


class TestTracing:
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("otlp_endpoint", "collector:4318"),
            ("otlp_endpoint", "http://user:canary@collector"),
            ("otlp_endpoint", "http://collector?key=canary"),
            ("sample_ratio", "1.5"),
        ],
    )
    def test_what_is_not_taken_is_said_without_secrets(self, key: str, value: object) -> None:
        with pytest.raises(ConfigError) as caught:
            load(flags={f"tracing.{key}": value})
        assert f"tracing.{key}" in str(caught.value)
        assert "canary" not in str(caught.value)

    def test_where_it_says_nothing_opentelemetrys_variables_count(self) -> None:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-key=a%20b, other=c%3Dd",
            "OTEL_SERVICE_NAME": "mine",
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,deployment.environment.name=prod",
        }
        said = load(env=env).tracing
        assert (said.otlp_endpoint, said.headers) == ("http://collector:4318", ["x-key=a b", "other=c=d"])
        told = dict(resource_of(said))
        assert (told["service.name"], told["deployment.environment.name"]) == ("mine", "prod")
        del env["OTEL_SERVICE_NAME"]
        assert dict(resource_of(load(env=env).tracing))["service.name"] == "theirs"
        assert dict(resource_of(load().tracing))["service.name"] == "carpool"
        assert load(env=env, toml='[tracing]\notlp_endpoint = ""\n').tracing.otlp_endpoint == ""

    @pytest.mark.parametrize(
        ("variable", "value"),
        [("SDK_DISABLED", "TRUE"), ("TRACES_EXPORTER", "none"), ("EXPORTER_OTLP_PROTOCOL", "grpc")],
    )
    def test_what_leaves_the_endpoint_of_opentelemetry_aside(self, variable: str, value: str) -> None:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", f"OTEL_{variable}": value}
        assert load(env=env).tracing.otlp_endpoint == ""
        assert load(env=env, flags={"tracing.otlp_endpoint": "http://a:1"}).tracing.otlp_endpoint == "http://a:1"

    def test_a_fault_in_one_of_them_is_said_without_secrets(self) -> None:
        for fault in ("canary", "x-key: canary%3D1", "x-key=canary%7F"):
            env = {"OTEL_EXPORTER_OTLP_HEADERS": fault}
            assert "tracing.headers (environment OTEL_EXPORTER_OTLP_HEADERS)" in refusal(env=env)
            assert "canary" not in refusal(env=env)
        for fault in ("team", "=x"):
            assert "OTEL_RESOURCE_ATTRIBUTES" in refusal(env={"OTEL_RESOURCE_ATTRIBUTES": fault})
        assert "OTEL_EXPORTER_OTLP_ENDPOINT" in refusal(env={"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"})

    @pytest.mark.parametrize(
        ("toml", "says"),
        [
            ("[tracing]\nheaders = []", "tracing.headers (carpool.toml) is gone: OTEL_EXPORTER_OTLP_HEADERS, the"),
            ("[upstream]\ntensor_shape = '1,2'", "upstream.tensor_shape (carpool.toml) is gone: write tensor = "),
            ("[models.a]\nload_header = 'X'", "models.a.load_header (carpool.toml) is gone: write load = "),
        ],
    )
    def test_a_key_that_is_gone_says_what_to_do(self, toml: str, says: str) -> None:
        assert refusal(toml=toml).startswith(says)

    def test_so_does_its_variable(self) -> None:
        said = refusal(env={"CARPOOL_TRACING_RESOURCE_ATTRIBUTES": "a=b"})
        assert said.startswith("CARPOOL_TRACING_RESOURCE_ATTRIBUTES (environment) is gone: OTEL_RESOURCE_ATTRIBUTES")

    def test_headers_are_secret(self) -> None:
        settings = load(env={"OTEL_EXPORTER_OTLP_HEADERS": "x-key=canary"})
        assert settings.tracing.headers == ["x-key=canary"]
        assert "canary" not in repr(settings) + dump_toml(settings)


class TestWebhooks:
    SECRET = "whsec_" + "Y2FuYXJ5" * 4
    ON = {"CARPOOL_WEBHOOKS_HOSTS": "a.example,*.b.example:8443", "CARPOOL_WEBHOOKS_SECRETS": SECRET}

    def test_their_secrets_are_not_shown(self) -> None:
        settings = load(env=self.ON)
        assert settings.webhooks.secrets == [self.SECRET]
        shown = dump_toml(settings)
        assert 'hosts = ["a.example", "*.b.example:8443"]' in shown
        assert self.SECRET not in shown + repr(settings)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("SECRETS", ""),
            ("SECRETS", SECRET + "x"),
            ("SECRETS", SECRET.removeprefix("whsec_")),
            ("HOSTS", "https://a.example/"),
            ("HOSTS", "a.example:0"),
        ],
    )
    def test_what_is_not_taken_is_said_without_secrets(self, key: str, value: str) -> None:
        text = refusal(env=self.ON | {f"CARPOOL_WEBHOOKS_{key}": value})
        assert f"webhooks.{key.lower()}" in text
        assert "Y2FuYXJ5" not in text


class TestCatalogue:
    ALL = [*KEYS.values(), *section_keys(TierSettings, "tiers."), *model_keys("models.")]

    def test_loading_needs_no_network_library(self) -> None:
        slow = {"aiohttp", "uvloop", "ssl", "joserfc", "cryptography"}
        code = f"import sys, carpool.settings; sys.exit(bool({slow} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


class TestTimeouts:
    """Unless it is set, the time of a synchronous request is enough for one call of any model."""

    def test_what_goes_together_is_not_warned_about(self) -> None:
        assert warnings_of(load()) == []
        assert warnings_of(load(toml="[upstream]\ntimeout_s = 30\n[broker]\nqueue_timeout_s = 30")) == []

    def test_who_never_gets_its_time_is_told_so(self) -> None:
        settings = load(
            toml="[broker]\nqueue_timeout_s = 4\ntotal_timeout_s = 4\n[upstream]\ntimeout_s = 1\n"
            "[models.quick]\n[models.slow]\ntimeout_s = 30"
        )
        queue, call = warnings_of(settings)
        assert queue.startswith("broker.queue_timeout_s (4 s) is not below broker.total_timeout_s (4 s)")
        assert call.startswith("models.slow.timeout_s (30 s) is not below broker.total_timeout_s (4 s)")
        (queue,) = warnings_of(load(toml="[broker]\nqueue_timeout_s = 5"))
        assert "broker.total_timeout_s (4 s, as it is not set)" in queue

    def test_a_total_that_follows_changes_with_the_next_start(self) -> None:
        quick, slow, slower = (load(toml=f"[upstream]\ntimeout_s = {seconds}") for seconds in (2, 3, 30))
        assert changed_for_the_next_start(quick, slow) == []
        assert changed_for_the_next_start(slow, slower) == ["broker"]
        fixed = "[broker]\ntotal_timeout_s = 40\n"
        slow, slower = (load(toml=f"{fixed}[upstream]\ntimeout_s = {seconds}") for seconds in (3, 30))
        assert changed_for_the_next_start(slow, slower) == []
