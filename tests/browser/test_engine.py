"""The live picture of the engine in a real browser: it is drawn, it changes, and it says whose the blocks are."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import OPTIONS, OpenPage
from tests.browser.playground import Playground
from tests.helpers.faults import engine_pid
from tests.helpers.server import Server, serve

pytestmark = pytest.mark.browser


def in_background(server: Server, **body: Any) -> threading.Thread:
    """Send a completion that takes a while."""
    whole = {"model": "quire-demo", "ignore_eos": True, "max_tokens": 700, "temperature": 1.0, **body}
    thread = threading.Thread(target=lambda: server.post("/v1/completions", whole))
    thread.start()
    return thread


def test_blocks_are_drawn_and_change_while_text_is_generated(page: Playground) -> None:
    before = page.ready().pool()
    assert before["cells"] == 512 == before["used"] + before["cached"] + before["free"]
    page.long_answers()
    page.send("Go on.")
    page.until(lambda: page.pool()["mine"] > 4)
    first = page.pool()
    assert first["used"] >= first["mine"]
    assert page.colors() > 1
    assert page.text(".request.mine .name") == "this chat"
    page.until(lambda: page.pool()["mine"] > first["mine"])
    page.page.keyboard.press("Escape")
    page.until(lambda: page.pool()["used"] == 0)
    assert page.pool()["cached"] > before["cached"]
    assert page.page.locator(".request").count() == 0


def test_requests_of_others_have_colours_and_names_of_their_own(page: Playground, server: Server) -> None:
    page.ready()
    others = [f"other{number}" for number in range(12)]  # so many that they last for more than a look or two
    threads = [in_background(server, prompt=f"Act of {name}.", request_id=name, max_tokens=900) for name in others]
    page.until(lambda: page.page.locator(".request").count() >= 3)
    names = page.page.locator(".request .name").all_inner_texts()
    assert len({f"text {name}" for name in others} & set(names)) >= 3
    swatches = page.evaluate("() => [...document.querySelectorAll('.request .swatch')].map((s) => s.style.background)")
    assert len(set(swatches)) >= 3
    assert page.pool()["mine"] == 0
    for thread in threads:
        thread.join(60)
    page.until(lambda: page.page.locator(".request").count() == 0)


def test_samples_share_blocks_and_waiting_requests_wait(page: Playground, server: Server) -> None:
    page.ready()
    prompt = "The king is come to court. " * 8
    threads = [in_background(server, prompt=prompt, n=4, max_tokens=300) for _ in range(5)]
    page.until(lambda: page.pool()["shared"] > 0 and "Waiting" in page.text("#queues"))
    assert "\u00d74" in page.text("#queues")
    for thread in threads:
        thread.join(60)


def test_a_block_says_what_it_is(page: Playground) -> None:
    page.ready().long_answers()
    page.send("Go on.")
    page.until(lambda: page.pool()["mine"] > 3)
    canvas = page.page.locator(".pool canvas").first
    canvas.focus()
    page.page.keyboard.press("Home")
    page.until(lambda: page.text("#pool-readout").startswith("Block 0: "))
    told = {page.text("#pool-readout").split(": ", 1)[1]}
    for _ in range(page.pool()["cells"]):
        if "held by this chat" in told:
            break
        page.page.keyboard.press("ArrowRight")
        told.add(page.text("#pool-readout").split(": ", 1)[1])
    assert "held by this chat" in told
    page.page.keyboard.press("Escape")
    canvas.hover(position={"x": 5, "y": 5})
    page.until(lambda: page.text("#pool-readout").startswith("Block 0: "))


def test_plots_and_numbers_follow(page: Playground) -> None:
    page.ready().long_answers()
    page.send("Go on.")
    page.until(lambda: not page.answering)
    speed = ".plot[data-plot=speed] b"
    page.until(lambda: float(page.text(speed).split("tokens")[0]) > 1)
    assert page.text(".plot[data-plot=first] b").strip().endswith("s")
    assert "tokens/s" in page.text("#engine-brief")
    drawn = """() => [...document.querySelectorAll('.plot canvas')].map((canvas) =>
      canvas.getContext('2d').getImageData(0, 20, canvas.width, canvas.height - 24).data.some((value) => value > 0))"""
    page.until(lambda: all(page.evaluate(drawn)))
    page.page.check("input[name=span][value='60']", force=True)
    assert all(page.evaluate(drawn))


def test_all_viewers_together_ask_the_engine_at_most_four_times_a_second(open_page: OpenPage, server: Server) -> None:
    pages = [open_page().ready() for _ in range(3)]
    numbers = {page.evaluate("() => document.body.dataset.pictures") for page in pages}
    assert len(numbers) == 1  # nothing runs, so that there is one picture, and all have it
    polls = [url for page in pages for _, url, _ in page.requests if "/playground/state" in url]
    assert polls and all("since=" in url for url in polls)


def test_a_server_that_goes_away_is_missed(page: Playground) -> None:
    page.ready()
    page.expected += ["Failed to load resource", "net::"]
    page.page.route("**/playground/state*", lambda route: route.abort())
    page.until(lambda: page.text("#engine-state") == "not reachable")
    page.page.unroute("**/playground/state*")
    page.until(lambda: page.text("#engine-state") == "ready")


def test_an_engine_that_is_killed_is_replaced_before_ones_eyes(open_page: OpenPage, tmp_path: Path) -> None:
    with serve(tmp_path / "log", *OPTIONS) as server:
        page = open_page(server.url).ready()
        page.long_answers()
        page.send("Go on.")
        page.until(lambda: page.pool()["mine"] > 3)
        page.evaluate(
            """() => {
              window.states = [];
              const pill = document.getElementById('engine-state');
              new MutationObserver(() => window.states.push(pill.textContent)).observe(pill, {childList: true});
            }"""
        )
        os.kill(engine_pid(server), signal.SIGKILL)
        page.until(lambda: "restarting" in page.evaluate("() => window.states"))
        page.until(lambda: page.text("#engine-state") == "ready" and page.page.locator(".pool canvas").count())
        assert len(page.answer()) > 1000
        assert page.page.locator(".message .field-error:visible").count() == 0


def test_one_chat_is_seen_in_a_pool_of_thousands(open_page: OpenPage, tmp_path: Path) -> None:
    with serve(tmp_path / "log", "--num-gpu-blocks-override=16384", "--block-size=16") as server:
        page = open_page(server.url).ready()
        assert "16,384 blocks of 16 tokens" in page.text("#pool-size")
        assert "shown are the first 512, the others are free" in page.text("#pool-size")
        page.long_answers()
        page.send("Go on.")
        page.until(lambda: page.pool()["mine"] > 3)
        assert page.pool()["cells"] == 512 and page.pool()["free"] > 16000
        page.page.keyboard.press("Escape")


OWN_PIXELS = """async () => {
  const { Pool } = await import(new URL('playground/pool.js', document.baseURI).href);
  const pool = new Pool('device', () => {});
  document.getElementById('pools').append(pool.root);
  const states = 'c'.repeat(9000) + '11' + 'c'.repeat(7382);
  const counts = { used: 2, cached: 16382, free: 0, loading: 0, shared: 0 };
  const map = { tier: 'device', num_blocks: 16384, counts, per_cell: 1, states, sets: [[], [0]], owners: 'ABAB' };
  pool.update(map, [{ name: 'this chat', color: () => 'rgb(255, 0, 0)', mine: true, key: 'k' }]);
  const { data } = pool.canvas.getContext('2d').getImageData(0, 0, pool.canvas.width, pool.canvas.height);
  let red = 0;
  for (let at = 0; at < data.length; at += 4) red += data[at] > 200 && data[at + 1] < 60;
  pool.root.remove();
  return red;
}"""


def test_blocks_of_this_chat_stand_out_among_thousands_of_cached_ones(page: Playground) -> None:
    assert page.ready().evaluate(OWN_PIXELS) > 25  # two cells of at most three pixels by three would have fewer
