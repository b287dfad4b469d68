"""Whom the admin port answers (rules at the top of `face/http/admin_guard.py`)."""

from collections.abc import Callable

import pytest

from carpool.core.errors import Forbidden, RateLimited, Unauthorized
from carpool.face.http.admin_guard import LOGIN_S, OWN_MAX, OWN_S, AdminGuard, mac

LOCAL = AdminGuard(wall=float, clock=float)
NAMED = AdminGuard(hosts=["Carpool.internal."], wall=float, clock=float)
OPEN = AdminGuard(tokens=["secret", "older"], is_loopback=False, wall=float, clock=float)
HOST = {b"host": b"10.1.2.3"}


def test_a_configured_name_is_known() -> None:
    assert NAMED.refusal(b"GET", {b"host": b"carpool.INTERNAL:8001"}) is None
    assert NAMED.refusal(b"GET", {b"host": b"carpool.internal."}) is None
    assert isinstance(NAMED.refusal(b"GET", {b"host": b"x.carpool.internal"}), Forbidden)


@pytest.mark.parametrize("method", [b"POST", b"DELETE", b"PUT", b"PATCH"])
@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"http://localhost:3000", b"127.0.0.1:8001", b""])
def test_another_site_changes_nothing(method: bytes, origin: bytes) -> None:
    headers = {b"host": b"127.0.0.1:8001", b"origin": origin}
    assert isinstance(LOCAL.refusal(method, headers), Forbidden)


def test_its_own_page_may_change_things() -> None:
    assert LOCAL.refusal(b"POST", {b"host": b"127.0.0.1:8001", b"origin": b"http://127.0.0.1:8001"}) is None
    headers = {b"host": b"127.0.0.1:8001", b"origin": b"https://carpool.internal"}
    assert NAMED.refusal(b"DELETE", headers) is None


def test_a_cookie_stands_for_a_token_until_its_time_is_over() -> None:
    now = [1000.0]
    guard = AdminGuard(tokens=["secret", "older"], is_loopback=False, wall=lambda: now[0], clock=float)
    host = {b"host": b"10.1.2.3:8001"}
    assert isinstance(guard.login(b"wrong"), Unauthorized)
    assert isinstance(guard.login(b""), Unauthorized)
    for token in (b"secret", b"older"):
        given = guard.login(token)
        assert isinstance(given, bytes)
        cookie, _, attributes = given.partition(b"; ")
        assert {b"HttpOnly", b"SameSite=Strict", b"Path=/"} <= set(attributes.split(b"; "))
        assert token not in given
        assert guard.refusal(b"GET", host | {b"cookie": b"other=1; " + cookie}) is None
        assert (
            AdminGuard(tokens=["new"], is_loopback=False, wall=float, clock=float).refusal(
                b"GET", host | {b"cookie": cookie}
            )
            is not None
        )
        now[0] += LOGIN_S + 1
        assert isinstance(guard.refusal(b"GET", host | {b"cookie": cookie}), Unauthorized)


def test_the_end_of_a_cookie_cannot_be_moved() -> None:
    given = OPEN.login(b"secret")
    assert isinstance(given, bytes)
    end, _, proof = given.partition(b";")[0].partition(b"=")[2].partition(b".")
    later = b"carpool_admin=%d.%b" % (int(end) + 1, proof)
    assert isinstance(OPEN.refusal(b"GET", {b"host": b"10.1.2.3", b"cookie": later}), Unauthorized)


@pytest.mark.parametrize("site", [b"cross-site", b"same-site"])
def test_with_a_cookie_nothing_is_told_to_another_origin(site: bytes) -> None:
    given = OPEN.login(b"secret")
    assert isinstance(given, bytes)
    headers = {b"host": b"10.1.2.3", b"cookie": given.partition(b";")[0]}
    assert OPEN.refusal(b"GET", headers | {b"sec-fetch-site": b"same-origin"}) is None
    assert OPEN.refusal(b"GET", headers | {b"sec-fetch-site": site}) is not None
    # Whatever it shows, it changes nothing.
    assert isinstance(LOCAL.refusal(b"POST", {b"host": b"localhost", b"sec-fetch-site": site}), Forbidden)


def test_what_is_open_needs_no_token_but_the_right_host() -> None:
    assert OPEN.refusal(b"GET", {b"host": b"10.1.2.3"}, is_open=True) is None
    assert isinstance(OPEN.refusal(b"GET", {b"host": b"evil.example"}, is_open=True), Forbidden)


# The pace of guesses; what it counts and forgets is in test_guess_pace.py.


def by_header(guard: AdminGuard, token: bytes, address: str) -> object:
    return guard.refusal(b"GET", HOST | {b"authorization": b"Bearer " + token}, address)


def by_login(guard: AdminGuard, token: bytes, address: str) -> object:
    given = guard.login(token, address)
    return None if isinstance(given, bytes) else given


def by_cookie(guard: AdminGuard, token: bytes, address: str) -> object:
    """Whoever guesses a token can make a cookie of it."""
    return guard.refusal(b"GET", HOST | {b"cookie": b"carpool_admin=9999." + mac(token, b"9999")}, address)


@pytest.mark.parametrize("guess", [by_header, by_login, by_cookie])
def test_tokens_are_guessed_slowly(guess: Callable[[AdminGuard, bytes, str], object]) -> None:
    now = [1000.0]
    guard = AdminGuard(tokens=["secret"], is_loopback=False, wall=lambda: now[0], clock=lambda: now[0])
    for number in range(OWN_MAX):
        assert isinstance(guess(guard, b"%d" % number, "10.0.0.1"), Unauthorized)
    for _ in range(50):
        refusal = guess(guard, b"again", "10.0.0.1")
        assert isinstance(refusal, RateLimited) and refusal.retry_after_s == OWN_S
    assert isinstance(guess(guard, b"secret", "10.0.0.1"), RateLimited), "a right guess is not told from a wrong one"
    assert guess(guard, b"secret", "10.0.0.2") is None, "others are let in"
    now[0] += OWN_S
    assert guess(guard, b"secret", "10.0.0.1") is None


def test_who_shows_nothing_or_an_old_cookie_guesses_nothing() -> None:
    now = [1000.0]
    guard = AdminGuard(tokens=["secret"], is_loopback=False, wall=lambda: now[0], clock=lambda: now[0])
    given = guard.login(b"secret", "a")
    assert isinstance(given, bytes)
    now[0] += LOGIN_S
    for _ in range(3 * OWN_MAX):
        assert isinstance(guard.refusal(b"GET", HOST, "a"), Unauthorized)
        old = HOST | {b"cookie": given.partition(b";")[0]}
        assert isinstance(guard.refusal(b"GET", old, "a"), Unauthorized)
    assert by_header(guard, b"secret", "a") is None
