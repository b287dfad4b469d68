"""Pictures of the live page for the docs, from a demo that runs: `make pictures`."""

import sys
import time
from pathlib import Path

from playwright.sync_api import FloatRect, sync_playwright

from support.demo import running_demo
from support.gateway import eventually

WIDTH, BYTES_MAX = 1280, 200_000
# Without the tables at the end.
CLIP = FloatRect(x=0, y=0, width=WIDTH, height=1230)


def main(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    with running_demo(8, latency_ms=200) as demo, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        light = browser.new_page(viewport={"width": WIDTH, "height": 830})
        phone = browser.new_page(viewport={"width": 390, "height": 844}, device_scale_factor=1.5, color_scheme="dark")
        whole = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=0.65)
        pages = {"page": light, "page-phone": phone, "page-flood": whole}
        for page in pages.values():
            page.goto(f"http://127.0.0.1:{demo.admin_port}/")
        demo.grant(rate=900)
        eventually(lambda: light.evaluate("carpool.last?.demo?.comparison"))
        demo.grant(poison=True)
        eventually(lambda: demo.metric("carpool_dead_letters_kept") == 1)
        demo.grant(kill=5)
        eventually(lambda: light.evaluate("carpool.cars.cars.some((car) => car.state === 'offline')"))
        time.sleep(25)
        phone.evaluate("document.querySelector('.tiles').scrollIntoView()")
        for name, page in pages.items():
            if page is whole:
                demo.grant(rate=600, flood=True)
                time.sleep(15)
            page.bring_to_front()
            time.sleep(1.5)
            page.screenshot(
                path=directory / f"{name}.png", full_page=page is whole, clip=CLIP if page is whole else None
            )
            page.close()
        browser.close()
    too_large = [path.name for path in directory.glob("*.png") if path.stat().st_size > BYTES_MAX]
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
