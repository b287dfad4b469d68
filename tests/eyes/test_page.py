"""The live page in a real Chromium: it shows what is true, and each control does what it says."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from support.demo import Demo, running_demo
from support.gateway import ask, eventually
from support.processes import PATIENCE_S, GatewayProcess, start_gateway
from support.redis_servers import free_port

GPUS = 4
PATIENCE_MS = PATIENCE_S * 1000
TOKEN = "a-service-token-of-some-length"

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with running_demo(GPUS, latency_ms=100) as running:
        yield running


@pytest.fixture
def look(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages; at the end none of them has met an error, but for those that were expected."""
    pages: list[Page] = []
    errors: list[str] = []

    def open_page(admin_port: int, *, expected: str = "(?!)", **context: Any) -> Page:
        page = browser.new_context(**context).new_page()
        page.set_default_timeout(PATIENCE_MS)

        def complain(text: str) -> None:
            if not re.search(expected, text):
                errors.append(text)

        page.on("pageerror", lambda error: complain(str(error)))
        page.on("console", lambda message: complain(message.text) if message.type == "error" else None)
        page.goto(f"http://127.0.0.1:{admin_port}/")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.context.close()
    assert errors == []


def shows(page: Page, condition: str) -> None:
    """Wait until this is true on the page. Not by a function of its own: the page lets nobody evaluate anything."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not page.evaluate(condition):
        assert time.monotonic() < give_up_at, condition
        page.wait_for_timeout(100)


@contextmanager
def gateway_at(directory: Path, upstream: str, port: int, **settings: str) -> Iterator[GatewayProcess]:
    """`carpool serve` on a port and the next one; without an event loop, for the browser has one."""
    flags = ("--port", str(port), "--admin-port", str(port + 1))
    gateway = start_gateway(directory, upstream, flags, settings)

    def is_ready() -> bool:
        try:
            return ask(port + 1, "GET", "/").status == 200
        except OSError:
            return False

    try:
        assert eventually(is_ready)
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.kill()


def two_ports() -> int:
    """A free port with a free one behind it."""
    while True:
        port = free_port()
        with socket.socket() as behind:
            try:
                behind.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        return port


def set_load(page: Page, key: str) -> None:
    """With the keyboard, as somebody without a mouse does."""
    page.locator("#d-load").focus()
    page.keyboard.press(key)


def test_it_shows_what_is_true(demo: Demo, look: Callable[..., Page]) -> None:
    page = look(demo.admin_port)
    expect(page.locator("#status")).to_have_text("healthy")
    demo.grant(rate=80)
    shows(page, "Number(document.getElementById('answered').textContent) > 20")
    for tier in range(3):
        shows(page, f"carpool.last?.tiers[{tier}].answered > 0")
    demo.grant(rate=0)
    assert eventually(lambda: demo.metric("carpool_held_requests") == 0)
    answered = int(demo.metric('carpool_requests_total{outcome="ok"}'))
    expect(page.locator("#totals")).to_have_attribute("data-ok", str(answered))
    expect(page.locator("#answered")).to_have_text("0")
    slots = page.evaluate("carpool.cars.cars.length")
    assert slots == GPUS


def test_cars_move(demo: Demo, look: Callable[..., Page]) -> None:
    page = look(demo.admin_port)
    shows(page, f"carpool.cars.cars.length === {GPUS}")
    resting = page.locator("#cars").screenshot()
    demo.grant(rate=200)
    shows(page, "carpool.cars.moved > 10")
    assert eventually(lambda: page.locator("#cars").screenshot() != resting)
    page.keyboard.press("p")
    expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
    page.wait_for_timeout(200)
    frozen = page.evaluate("carpool.cars.moved")
    page.wait_for_timeout(1500)
    assert page.evaluate("carpool.cars.moved") == frozen
    page.keyboard.press("p")
    shows(page, f"carpool.cars.moved > {frozen}")
    demo.grant(rate=0)


def test_with_less_motion_it_shows_the_same(demo: Demo, look: Callable[..., Page]) -> None:
    page = look(demo.admin_port, reduced_motion="reduce")
    demo.grant(rate=200)
    shows(page, "carpool.cars.moved > 10")
    demo.grant(rate=0)


def test_light_and_dark(demo: Demo, look: Callable[..., Page]) -> None:
    page = look(demo.admin_port, color_scheme="dark")
    theme = page.locator("html")
    expect(theme).to_have_attribute("data-theme", "dark")
    page.keyboard.press("t")
    expect(theme).to_have_attribute("data-theme", "light")
    page.reload()
    expect(theme).to_have_attribute("data-theme", "light")


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_it_fits(demo: Demo, look: Callable[..., Page], width: int) -> None:
    page = look(demo.admin_port, viewport={"width": width, "height": 800})
    expect(page.locator("#status")).to_have_text("healthy")
    expect(page.locator("#demo")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_load(demo: Demo, look: Callable[..., Page]) -> None:
    page = look(demo.admin_port)
    for _ in range(12):
        set_load(page, "ArrowRight")
    shows(page, "carpool.last?.demo.rate > 10")
    shows(page, "carpool.last?.tiers.every((tier) => tier.answered > 0)")
    shows(page, "carpool.last?.demo.comparison !== null")
    expect(page.locator("#d-many-gpus")).to_have_text(re.compile(r"\d"))
    expect(page.locator("#d-one-gpus")).to_have_text(re.compile(r"\d"))
    set_load(page, "Home")
    shows(page, "carpool.last?.demo.rate === 0")


@pytest.mark.parametrize("policy", ["fixed", "pid", "adaptive"])
def test_the_policy(demo: Demo, look: Callable[..., Page], policy: str) -> None:
    page = look(demo.admin_port)
    button = page.get_by_role("button", name=policy)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    shows(page, f"carpool.last?.demo.policy === '{policy}'")


def test_the_flood(demo: Demo, look: Callable[..., Page]) -> None:
    page = look(demo.admin_port)
    button = page.get_by_role("button", name="Flood")
    button.click()
    shows(page, "carpool.last?.tiers.at(-1).offered > 200")
    assert page.evaluate("carpool.last?.tiers[0].offered") == 0
    button.click()
    shows(page, "carpool.last?.tiers.at(-1).offered === 0")


def test_a_gpu_dies_and_comes_back(demo: Demo, look: Callable[..., Page]) -> None:
    page = look(demo.admin_port)
    back = page.get_by_role("button", name="Bring it back")
    expect(back).to_be_disabled()
    page.get_by_role("button", name="Kill a GPU").click()
    shows(page, "carpool.cars.cars.filter((car) => car.state === 'offline').length === 1")
    expect(page.locator("#endpoints-count")).to_have_text(f"{GPUS - 1} of {GPUS} healthy")
    back.click()
    assert eventually(lambda: demo.infer("again").status == 200 and demo.states() == ["healthy"] * GPUS)
    shows(page, "carpool.cars.cars.every((car) => car.state === 'healthy')")


def poisoned(demo: Demo) -> int:
    """The id of a new dead letter."""
    before = demo.letters()
    demo.grant(poison=True)
    assert eventually(lambda: demo.letters() - before)
    return max(demo.letters() - before)


def test_poison_its_letter_replay_and_drop(demo: Demo, look: Callable[..., Page]) -> None:
    page = look(demo.admin_port)
    expect(page.locator("#letters tbody")).to_contain_text("none")
    page.get_by_role("button", name="Poison an input").click()
    assert eventually(demo.letters)
    [replayed] = demo.letters()

    def row(letter: int) -> Locator:
        return page.locator(f'#letters tbody tr:has(td:first-child:text-is("{letter}"))')

    row(replayed).get_by_role("button", name="Replay").click()
    expect(row(replayed)).to_have_count(0)  # it is a task now; if it fails again, it has another number
    dropped = poisoned(demo)
    row(dropped).get_by_role("button", name="Drop").click()
    assert dropped in demo.letters()
    row(dropped).get_by_role("button", name="Sure?").click()
    expect(row(dropped)).to_have_count(0)
    assert dropped not in demo.letters()


def test_slow_requests_have_a_timeline(demo: Demo, look: Callable[..., Page]) -> None:
    page = look(demo.admin_port)
    shows(page, "carpool.last?.seconds > 0")
    request_id = demo.infer("slow").json["request_id"]
    row = page.locator("#slow tbody tr", has_text=request_id)
    expect(row).to_be_visible()
    expect(row.locator(".bar i")).to_have_count(4)
    target = page.locator("#slow td.id a").first.get_attribute("href")
    assert target is not None and ask(demo.admin_port, "GET", target).json["waits"], "its story is behind the link"


def test_it_goes_on_when_the_gateway_was_restarted(tmp_path: Path, look: Callable[..., Page]) -> None:
    port = two_ports()
    with gateway_at(tmp_path, "sim:?latency_ms=20", port) as first:
        page = look(port + 1, expected="net::ERR|Failed to load")
        expect(page.locator("#status")).to_have_text("healthy")
        first.kill()
        expect(page.locator("#status")).to_have_text("not connected")
    with gateway_at(tmp_path, "sim:?latency_ms=20&slots=3", port):
        expect(page.locator("#status")).to_have_text("healthy")
        shows(page, "carpool.cars.cars.length === 3")
        assert ask(port, "POST", "/v1/inference", {"input": "x"}, "Content-Type: application/json").status == 200
        expect(page.locator("#totals")).to_have_attribute("data-ok", "1")
        shows(page, "carpool.cars.moved > 0")
        expect(page.locator("#demo")).to_be_hidden()


def test_a_login(tmp_path: Path, look: Callable[..., Page]) -> None:
    port = two_ports()
    with gateway_at(tmp_path, "sim:", port, **{"service.token": TOKEN}):
        page = look(port + 1, expected="401|net::ERR")
        expect(page.locator("#login")).to_be_visible()
        page.locator("#token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#login-problem")).to_have_text("This is not a service token.")
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("healthy")
        assert page.evaluate("document.cookie") == ""
        [cookie] = page.context.cookies()
        assert (cookie.get("httpOnly"), cookie.get("sameSite")) == (True, "Strict")
        page.reload()
        expect(page.locator("#status")).to_have_text("healthy")
        page.locator("#logout").click()
        expect(page.locator("#login")).to_be_visible()


STRANGER = """<script>
const admin = "http://127.0.0.1:%d";
const tries = {
  read: () => fetch(admin + "/internal/health", { credentials: "include" }).then((answer) => answer.text()),
  stream: () => new Promise((resolve, reject) => {
    const source = new EventSource(admin + "/internal/live", { withCredentials: true });
    source.onmessage = resolve;
    source.onerror = reject;
  }),
  post: () => fetch(admin + "/internal/dead-letters/replay", { method: "POST", mode: "no-cors" })
    .then((answer) => answer.text()),
  drop: () => fetch(admin + "/internal/dead-letters?all=true", { method: "DELETE", credentials: "include" }),
};
window.told = {};
Promise.all(Object.entries(tries).map(async ([name, work]) => {
  try { window.told[name] = await work(); } catch { window.told[name] = null; }
})).then(() => { window.over = true; });
</script>"""


def test_another_origin_neither_reads_nor_changes_anything(demo: Demo, browser: Browser, tmp_path: Path) -> None:
    letter = poisoned(demo)
    (tmp_path / "index.html").write_text(STRANGER % demo.admin_port)
    with HTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{stranger.server_port}/")
        shows(page, "window.over")
        told = page.evaluate("window.told")
        page.close()
        stranger.shutdown()
    # What cannot be read is nothing, or empty.
    assert {name: answer or None for name, answer in told.items()} == dict.fromkeys(("read", "stream", "post", "drop"))
    assert letter in demo.letters()
