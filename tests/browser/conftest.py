"""A real Chromium, one for each test process, and pages of it that complain if anything went wrong behind the picture.

Which Chromium, and what happens without one: tests/browser/chromium.py.
Pictures are kept in build/screenshots, or where FLOODMARK_SCREENSHOTS says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import floodmark as fm
from tests.browser import chromium
from tests.browser.world import fill
from tests.conftest import Place
from tests.contract.test_receive_http import served

# For a busy machine; none of these times is waited for if all is well.
expect.set_options(timeout=20_000)
SHOTS = Path(os.environ.get("FLOODMARK_SCREENSHOTS", "build/screenshots"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.parent == Path(__file__).parent]
    reason = chromium.why_not() if mine else None
    if reason is None:
        return
    if chromium.wish() == chromium.DEMAND:
        raise pytest.UsageError(f"browser tests are demanded, and {reason}")
    for item in mine:
        item.add_marker(pytest.mark.skip(reason=f"{chromium.SKIPPED}: {reason}"))


# Not for the whole session: as long as it is there its event loop runs in this thread, and others cannot run theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = chromium.find()
    assert found, "no Chromium was found"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, and whatever its console, its requests or the policy of its contents complained of."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    # Parts of complaints that a test wants to see.
    expected: tuple[str, ...] = ()
    is_open: bool = True

    def __post_init__(self) -> None:
        def keep(kind: str, text: str) -> None:
            if self.is_open:
                self.complaints.append(f"{kind}: {text}")

        self.page.on("console", lambda said: said.type in ("error", "warning") and keep(said.type, said.text))
        self.page.on("pageerror", lambda error: keep("error", str(error)))
        self.page.on("requestfailed", lambda request: keep("failed", f"{request.url} {request.failure}"))
        self.page.on(
            "response", lambda answer: answer.status >= 400 and keep("status", f"{answer.status} {answer.url}")
        )
        self.page.on("request", lambda request: self._same_origin(request.url, keep))

    def _same_origin(self, url: str, keep: Callable[[str, str], None]) -> None:
        if not url.startswith(("http://127.0.0.1:", "data:")):
            keep("elsewhere", url)

    def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png", full_page=True)

    def close(self) -> None:
        """The test is over: what happens to its server from now on is not the page's fault."""
        self.is_open = False
        self.page.context.close()

    def check(self) -> None:
        # What the page itself gives up, when it goes or connects anew, is no failure.
        expected = (*self.expected, "net::ERR_ABORTED")
        left = [one for one in self.complaints if not any(part in one for part in expected)]
        assert not left, "\n".join(left)


Look = Callable[..., Watched]


@pytest.fixture
def look(browser: Browser) -> Iterator[Look]:
    """Open an address in a window of its own; all of them must have had nothing to complain of at the end."""
    opened: list[Watched] = []

    def open_page(url: str, *, width: int = 1280, theme: Any = "light", expected: tuple[str, ...] = ()) -> Watched:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce"
        )
        context.set_default_timeout(20_000)
        watched = Watched(context.new_page(), expected=expected)
        opened.append(watched)
        watched.page.goto(url)
        return watched

    yield open_page
    for watched in opened:
        watched.close()
    for watched in opened:
        watched.check()


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")
        yield lake


@pytest.fixture
def url(lake: fm.Lake) -> Iterator[str]:
    with served(lake) as client:
        yield str(client.base_url)


@pytest.fixture(scope="module")
def full_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A lake where something is to be seen in every part of the page."""
    with (
        fm.open(tmp_path_factory.mktemp("full") / "lake", create=True, actor="ana") as lake,
        fill(lake) as intake,
        served(lake, intake=intake) as client,
    ):
        yield str(client.base_url)


@pytest.fixture(scope="module")
def empty_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with fm.open(tmp_path_factory.mktemp("empty") / "lake", create=True) as lake, served(lake) as client:
        yield str(client.base_url)
