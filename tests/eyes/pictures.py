"""Pictures of the live page for the docs, from a demo that runs: `make pictures`."""

import sys
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from support.demo import running_demo
from support.gateway import eventually

WIDTH, BYTES_MAX = 1280, 200_000


def main(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    with running_demo(8, latency_ms=200) as demo, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        light = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        dark = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="dark")
        phone = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="light", device_scale_factor=2)
        pages = {"page": light, "page-dark": dark, "page-phone": phone}
        for page in pages.values():
            page.goto(f"http://127.0.0.1:{demo.admin_port}/")
        demo.grant(rate=900)
        eventually(lambda: light.evaluate("carpool.last?.demo?.comparison"))
        demo.grant(poison=True)
        eventually(lambda: demo.metric("carpool_dead_letters_kept") == 1)
        demo.grant(kill=5)
        eventually(lambda: light.evaluate("carpool.cars.cars.some((car) => car.state === 'offline')"))
        time.sleep(25)
        for name, page in pages.items():
            page.bring_to_front()
            time.sleep(1.5)
            page.screenshot(path=directory / f"{name}.png")
        light.locator("#cars-panel").screenshot(path=directory / "cars.png")
        demo.grant(flood=True)
        time.sleep(10)
        light.screenshot(path=directory / "page-flood.png", full_page=True)
        browser.close()
    too_large = [path.name for path in directory.glob("*.png") if path.stat().st_size > BYTES_MAX]
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
