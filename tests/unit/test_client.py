"""What protects the calls to an endpoint: files read again when they change, and secrets that stay secret."""

import logging
import os
from pathlib import Path

import pytest

from carpool.testing import FakeClock
from carpool.upstream.client import without_secrets
from carpool.upstream.tls import LOOK_EVERY_S, Credentials, UpstreamSecurity


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("canary-1\n")
    return path


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def credentials(token: Path, clock: FakeClock) -> Credentials:
    return Credentials(UpstreamSecurity(token_file=str(token)), clock)


class TestRereading:
    def test_the_same_size_and_time_do_not_hide_a_change(self, token: Path, clock: FakeClock) -> None:
        found = credentials(token, clock)
        found.headers()
        before = token.stat()
        token.write_text("canary-2\n")
        os.utime(token, ns=(before.st_atime_ns, before.st_mtime_ns))
        clock.advance(LOOK_EVERY_S)
        assert found.headers() == {"Authorization": "Bearer canary-2"}

    @pytest.mark.parametrize("content", [None, "", "two words", "line\nline", "naïve"])
    def test_what_cannot_be_used_leaves_the_last_one_and_is_said_once(
        self, token: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, content: str | None
    ) -> None:
        caplog.set_level(logging.DEBUG, "carpool")
        found = credentials(token, clock)
        found.headers()
        if content is None:
            token.unlink()
        else:
            token.write_text(content)
        for _ in range(5):
            clock.advance(LOOK_EVERY_S)
            assert found.headers() == {"Authorization": "Bearer canary-1"}
        assert len(caplog.records) == 1
        assert caplog.records[0].levelname == "WARNING"
        assert not content or content not in caplog.text
        token.write_text("canary-3")
        clock.advance(LOOK_EVERY_S)
        assert found.headers() == {"Authorization": "Bearer canary-3"}
        assert "canary" not in caplog.text

    def test_one_that_is_missing_from_the_start_is_an_error(self, token: Path, clock: FakeClock) -> None:
        token.unlink()
        found = credentials(token, clock)
        with pytest.raises(FileNotFoundError):
            found.headers()
        token.write_text("canary-1")
        assert found.headers() == {"Authorization": "Bearer canary-1"}

    def test_the_context_is_one_object_until_a_file_changes(self, token: Path, clock: FakeClock) -> None:
        found = credentials(token, clock)
        context = found.ssl_context()
        token.write_text("canary-2")
        clock.advance(LOOK_EVERY_S)
        assert found.headers() == {"Authorization": "Bearer canary-2"}
        assert found.ssl_context() is context  # else every connection would be made anew

    def test_headers_and_token_together(self, token: Path, tmp_path: Path) -> None:
        (tmp_path / "key").write_text("  a value\n")
        security = UpstreamSecurity(token_file=str(token), header_files=(("X-Key", str(tmp_path / "key")),))
        assert security.headers() == {"X-Key": "a value", "Authorization": "Bearer canary-1"}


class TestErrorBodies:
    @pytest.mark.parametrize(
        ("value", "body", "left"),
        [
            (
                "Bearer canary-1",
                b'{"headers":"Bearer canary-1", "again":"canary-1"}',
                b'{"headers":"***", "again":"***"}',
            ),
            ('can"ary-1', rb'{"header":"can\"ary-1"}', b'{"header":"***"}'),
            ("64", b"batch size must be <= 64", b"batch size must be <= 64"),
        ],
    )
    def test_a_secret_that_is_repeated_is_taken_out(self, value: str, body: bytes, left: bytes) -> None:
        assert without_secrets({"Authorization": value}, body) == left
