"""A headless Chromium, real servers with the demo model, and pages of theirs that complain of everything unexpected."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.playground import Playground
from tests.helpers.server import Server, serve

OPTIONS = ("--num-gpu-blocks-override", "512", "--block-size", "8", "--max-num-seqs", "8")
KEY = "a-key-of-the-tests"

OpenPage = Callable[..., Playground]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, if this machine has one."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if path is None:
        pytest.skip("there is no Chromium here")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without keys."""
    with serve(tmp_path_factory.mktemp("server") / "log", *OPTIONS) as running:
        yield running


@pytest.fixture(scope="session")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that asks for `KEY`; until it listens nothing else can be asked without it."""
    log: Path = tmp_path_factory.mktemp("locked") / "log"
    with serve(log, *OPTIONS, "--api-key", KEY) as running:
        yield running.url


@pytest.fixture
def open_page(browser: Any, request: pytest.FixtureRequest) -> Iterator[OpenPage]:
    """Opens the playground of a server; at the end no page may have complained."""
    pages: list[Playground] = []

    def open_(url: str | None = None, *, width: int = 1440, height: int = 900, theme: str = "light") -> Playground:
        address = url if url is not None else request.getfixturevalue("server").url
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
        )
        pages.append(Playground(context.new_page(), address))
        return pages[-1]

    yield open_
    complaints = [complaint for page in pages for complaint in page.complaints()]
    for page in pages:
        page.page.context.close()
    assert complaints == []


@pytest.fixture
def page(open_page: OpenPage) -> Playground:
    """The playground on a desk."""
    return open_page()
