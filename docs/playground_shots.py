"""Makes the pictures of docs/playground.md: a server with the demo model, several requests at once, and a Chromium.

    python docs/playground_shots.py [--out docs/images]

Needs playwright and a Chromium. The pictures are reduced to a palette, so that they are small.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.playground import Playground  # noqa: E402
from tests.helpers.server import Server, serve  # noqa: E402

OPTIONS = ("--num-gpu-blocks-override=640", "--block-size=8", "--max-num-seqs=12", "--swap-space=2MiB")
NUM_CLIENTS = 11
WARM_UP_SECONDS = 75
COMMON = "The king is come to court, and all his lords with him. Enter the duke, the earl, and a messenger. "
QUESTIONS = ("What is Quire?", "What is 27 + 48?")
LAST = "Now speak as Romeo would, at length."
SCENES = ("Capulet's orchard", "a street in Verona", "the forest", "a room in the castle")


def keep_asking(server: Server, number: int, done: threading.Event) -> None:
    """Be one of several clients until `done`."""
    draw = random.Random(number)
    while not done.is_set():
        prompt = (COMMON if number % 3 == 0 else "") + f"Scene {draw.randrange(9)}: {draw.choice(SCENES)}. " * 3
        body = {
            "model": "quire-demo",
            "prompt": prompt,
            "max_tokens": draw.choice([120, 240, 400]),
            "temperature": 1.0,
            "ignore_eos": True,
            "n": 2 if number % 4 == 0 else 1,
        }
        server.post("/v1/completions", body)


def chat(page: Playground) -> None:
    """Have short conversations, and ask for one long answer in the last, which is under way at the end."""
    page.ready()
    for question in QUESTIONS:
        page.evaluate("() => document.getElementById('new-conversation').click()")  # the pointer stays away
        page.send(question)
        page.answer()
    page.evaluate("() => document.querySelector('#engine-panel').open = true")
    page.set("temperature", "0.8")
    page.set("min_p", "0.05")
    page.set("seed", "1623")
    page.page.route("**/v1/chat/completions", speak_on)
    page.send(LAST)
    page.until(lambda: page.pool()["mine"] > 24)


def speak_on(route: Any) -> None:
    """Let a request go on beyond the end that the demo model would put to it."""
    body = route.request.post_data_json
    route.continue_(post_data={**body, "min_tokens": 300})


def shoot(browser: Any, server: Server, path: Path, view: Callable[[Playground], None], **options: Any) -> None:
    """Take one picture."""
    context = browser.new_context(**options)
    page = Playground(context.new_page(), server.url)
    chat(page)
    view(page)
    page.page.screenshot(path=path)
    context.close()
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    sys.stdout.write(f"{path}: {path.stat().st_size // 1000} kB\n")


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    done = threading.Event()
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "log", *OPTIONS) as server:
        clients = [threading.Thread(target=keep_asking, args=(server, k, done)) for k in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        done.wait(WARM_UP_SECONDS)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium)
            desk = {"viewport": {"width": 1440, "height": 900}, "device_scale_factor": 1.5}
            phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}
            top = "() => window.scrollTo(0, 0)"
            shoot(browser, server, out / "playground-desktop.png", lambda page: None, color_scheme="light", **desk)
            shoot(browser, server, out / "playground-dark.png", lambda page: None, color_scheme="dark", **desk)
            shoot(browser, server, out / "playground-phone.png", lambda page: page.evaluate(top), **phone)
            browser.close()
        done.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    main()
