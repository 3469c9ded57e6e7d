"""The page in a real browser, on real lakes: it lives, it is honest, and everybody can use it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

import floodmark as fm
from floodmark.catalog.jobs import SHOWN_MS
from floodmark.serve.http.access import AccessToken, new_token, token_hash
from floodmark.testing.children import Child, run_child
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.served import serve_at
from tests.browser.conftest import Look
from tests.browser.world import append, fail_job, job_at_work, now_ms, set_job, start_job
from tests.conftest import Place, rows
from tests.contract.test_receive_http import served

THEMES = ("light", "dark")


def expect_figure(page: Page, name: str, value: object, table: str = "events") -> None:
    place = page.locator(f'#tables [data-figure="{name}"][data-table="{table}"]')
    expect(place).to_have_attribute("data-value", str(value))


def expect_health(page: Page, word: str) -> None:
    expect(page.locator("#health .word")).to_have_text(word)
    expect(page.locator("#health")).to_be_visible()
    expect(page.locator("#unknown")).to_be_hidden()


def expect_unknown(page: Page, reason: str) -> None:
    """The state is said to be unknown, and nothing that was known before is said to be so now."""
    expect(page.locator("#unknown .word")).to_have_text("State unknown")
    expect(page.locator("#unknown")).to_contain_text(reason)
    expect(page.locator("#health")).to_be_hidden()
    expect(page.locator("#banner")).to_be_hidden()
    expect(page).to_have_title("State unknown – Floodmark")


def check_accessible(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


# ── it lives ──


def test_what_another_process_commits_is_seen_without_a_reload(lake: fm.Lake, url: str, look: Look) -> None:
    page = look(url).page
    expect(page.locator("#live-text")).to_have_text("live")
    expect_figure(page, "rows", 0)
    page.evaluate("window.isSame = true")
    summary = page.locator("#chart-throughput summary")
    summary.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#chart-throughput details")).to_have_attribute("open", "")
    page.evaluate("window.scrollTo(0, 120)")
    run_child(append, Place(lake.location, None), "events", 1, 2, 3)
    expect_figure(page, "rows", 3)
    expect(page.locator("#commits .commit").first).to_contain_text("another process appended events +3")
    lake.create_table("notes", "id long")
    expect_figure(page, "rows", 0, "notes")
    assert page.evaluate("window.isSame") is True
    assert page.evaluate("window.scrollY") == 120
    expect(summary).to_be_focused()
    expect(page.locator("#chart-throughput details")).to_have_attribute("open", "")


def test_without_events_it_asks_now_and_then(lake: fm.Lake, url: str, look: Look) -> None:
    watched = look("about:blank", expected=("/api/events", "Failed to load resource"))
    watched.page.route("**/api/events", lambda route: route.abort())
    watched.page.goto(url)
    expect_figure(watched.page, "rows", 0)
    lake.append("events", rows(1))
    expect_figure(watched.page, "rows", 1)
    expect(watched.page.locator("html")).to_have_attribute("data-live", "polling")


# ── jobs and their banner ──


def test_a_job_is_watched_and_cancelled_by_keyboard_alone(lake: fm.Lake, url: str, look: Look) -> None:
    with job_at_work(lake) as go_on:
        watched = look(url)
        page = watched.page
        banner = page.locator("#banner")
        expect(banner).to_contain_text("years is running")
        expect(page.locator('[data-figure="percent"][data-job="years"]')).to_have_attribute("data-value", "20.0")
        button = page.locator("#jobs").get_by_role("button", name="Cancel years")
        button.focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("What is done stays")
        expect(dialog.get_by_role("button", name="Keep it")).to_be_focused()
        check_accessible(page)
        watched.shot("cancel")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(button).to_be_focused()
        assert not lake.backfill.show("years")["cancel_asked"]
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#said")).to_contain_text("years was asked to stop")
        expect(banner).to_contain_text("years is stopping")
        go_on.set()
        expect(banner).to_be_hidden()
    assert lake.backfill.show("years")["status"] == "cancelled"
    page.get_by_text("1 job that ended").click()
    expect(page.locator('[data-job-line="years"]')).to_contain_text("floodmark backfill resume years")


def test_a_failure_is_in_the_banner_until_it_is_dismissed(lake: fm.Lake, url: str, look: Look) -> None:
    page = look(url).page
    expect_health(page, "Fine")
    fail_job(lake)
    banner = page.locator("#banner")
    expect(banner).to_contain_text("years failed")
    expect(banner).to_contain_text("the source does not answer (chunk 20..30)")
    expect(banner.locator("code")).to_have_text("floodmark backfill resume years")
    expect_health(page, "Needs attention")
    expect(page.locator("#heard")).to_contain_text("job years failed")
    banner.get_by_role("button", name="Dismiss: years failed").focus()
    page.keyboard.press("Enter")
    expect(banner).to_be_hidden()
    expect(page.locator("#main")).to_be_focused()
    expect_health(page, "Fine")
    assert lake.backfill.show("years")["acknowledged"] is not None


def test_a_failure_leaves_the_banner_ten_minutes_after_its_end(lake: fm.Lake, url: str, look: Look) -> None:
    fail_job(lake)
    page = look(url).page
    expect(page.locator("#banner")).to_contain_text("years failed")
    set_job(lake, ended_ms=now_ms(lake) - SHOWN_MS)
    expect(page.locator("#banner")).to_be_hidden()
    expect_health(page, "Fine")


def test_jobs_that_cannot_be_read_are_in_the_banner(lake: fm.Lake, url: str, look: Look) -> None:
    start_job(lake)
    watched = look(url)
    expect(watched.page.locator("#banner")).to_contain_text("years is running")
    set_job(lake, spec="{")
    expect(watched.page.locator("#banner")).to_contain_text("Jobs cannot be read")
    expect(watched.page.locator("#banner code")).to_have_text("floodmark doctor")
    expect_health(watched.page, "Not ready")
    watched.shot("jobs-unreadable")


# ── it is honest ──


def test_a_state_that_cannot_be_read_is_unknown(lake: fm.Lake, url: str, look: Look) -> None:
    watched = look(url, expected=("status: 503", "status of 503"))
    page = watched.page
    expect_health(page, "Fine")
    faults = DatabaseFaults(lake.catalog.database, fail_at=1, mode="before", stay_broken=True)
    try:
        expect_unknown(page, "The lake's state cannot be read")
        expect(page.locator("#heard")).to_contain_text("State unknown")
        expect(page.locator("#unknown-since")).to_contain_text("UTC")
        watched.shot("unknown")
        check_accessible(page)
        fresh = look(url, expected=("status: 503", "status of 503"))
        expect_unknown(fresh.page, "The lake's state cannot be read")
        check_accessible(fresh.page)
    finally:
        faults.remove()
    expect_health(page, "Fine")
    expect_health(fresh.page, "Fine")


def wait_for_text(path: Path) -> str:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, "the server did not start"
        time.sleep(0.02)
    return path.read_text()


def test_a_server_that_is_killed_leaves_no_state_that_looks_fine(tmp_path: Path, lake: fm.Lake, look: Look) -> None:
    address = tmp_path / "address"
    child = Child(serve_at, lake.location, "127.0.0.1:0", str(address))
    url = wait_for_text(address)
    watched = look(url, expected=("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET"))
    expect_health(watched.page, "Fine")
    expect(watched.page.locator("#live-text")).to_have_text("live")
    child.process.kill()
    child.wait()
    expect_unknown(watched.page, "The server does not answer")
    watched.shot("killed")
    address.unlink()
    child = Child(serve_at, lake.location, url.removeprefix("http://"), str(address))
    try:
        expect_health(watched.page, "Fine")
        expect(watched.page.locator("#live-text")).to_have_text("live")
        watched.close()
    finally:
        child.process.kill()
        child.wait()


@pytest.mark.soak
def test_a_server_that_hangs_is_noticed_too(tmp_path: Path, lake: fm.Lake, look: Look) -> None:
    address = tmp_path / "address"
    child = Child(serve_at, lake.location, "127.0.0.1:0", str(address))
    try:
        watched = look(wait_for_text(address))
        expect(watched.page.locator("#live-text")).to_have_text("live")
        os.kill(child.pid, signal.SIGSTOP)
        watched.page.context.set_default_timeout(40_000)
        expect(watched.page.locator("#unknown")).to_contain_text("does not answer in time", timeout=40_000)
        expect_unknown(watched.page, "does not answer in time")
        os.kill(child.pid, signal.SIGCONT)
        expect_health(watched.page, "Fine")
        watched.close()
    finally:
        child.process.kill()
        child.wait()


def test_whatever_comes_from_the_lake_is_text(lake: fm.Lake, url: str, look: Look) -> None:
    bad = "<script>window.bad = 1</script><img src=x onerror='window.bad = 1'>\"'`&amp;"
    lake.append("events", rows(1), actor=bad, message=bad)
    fail_job(lake, bad, {"kind": bad, "message": bad, "facts": {bad: bad}, "advice": bad})
    page = look(url).page
    expect(page.locator("#commits .commit .who").first).to_have_text(bad)
    expect(page.locator("#commits .commit .message").first).to_have_text(bad)
    expect(page.locator(f'[data-job-line="{bad.replace(chr(34), chr(92) + chr(34))}"]')).to_be_visible()
    page.locator("#banner").get_by_role("button", name="Dismiss").click()
    expect(page.locator("#banner")).to_be_hidden()
    assert page.evaluate("window.bad") is None


# ── everybody can use it ──


@pytest.mark.parametrize("theme", THEMES)
def test_a_full_lake_in_both_themes(full_url: str, look: Look, theme: str) -> None:
    watched = look(full_url, theme=theme)
    page = watched.page
    expect(page.locator("#live-text")).to_have_text("live")
    watched.shot(f"full-{theme}")
    check_accessible(page)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    check_accessible(page)


@pytest.mark.parametrize("theme", THEMES)
def test_an_empty_lake_says_what_to_do_next(empty_url: str, look: Look, theme: str) -> None:
    watched = look(empty_url, theme=theme)
    expect(watched.page.locator("#health")).to_contain_text("an empty lake")
    for part in ("tables", "ways-in", "ways-out", "jobs", "commits", "recovery", "tasks"):
        expect(watched.page.locator(f"#{part} .empty code")).to_be_visible()
    watched.shot(f"empty-{theme}")
    check_accessible(watched.page)


@pytest.mark.parametrize("width", [320, 360, 768])
def test_a_narrow_window_shows_all_of_it(full_url: str, empty_url: str, look: Look, width: int) -> None:
    for name, address in (("full", full_url), ("empty", empty_url)):
        watched = look(address, width=width, theme="dark" if width == 320 else "light")
        expect(watched.page.locator("#health")).to_be_visible()
        watched.shot(f"{name}-{width}")
        assert overflow(watched.page) == 0
        watched.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        assert overflow(watched.page) == 0
        check_accessible(watched.page)


def test_a_theme_that_was_chosen_is_remembered(empty_url: str, look: Look) -> None:
    page = look(empty_url, theme="light").page
    button = page.get_by_role("button", name="Dark theme")
    expect(button).to_have_attribute("aria-pressed", "false")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    expect(page.get_by_role("button", name="Dark theme")).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_the_first_tab_stop_skips_to_the_state(empty_url: str, look: Look) -> None:
    page = look(empty_url).page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the lake's state")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()


def test_a_token_opens_the_page_and_its_role_says_what_may_be_done(lake: fm.Lake, look: Look) -> None:
    reader, admin = new_token(), new_token()
    tokens = [AccessToken("desk", token_hash(reader), "read"), AccessToken("boss", token_hash(admin), "admin")]
    start_job(lake)
    with served(lake, tokens=tokens) as client:
        watched = look(str(client.base_url), width=360, expected=("status: 401", "status of 401"))
        page = watched.page
        expect(page.get_by_label("Token")).to_be_focused()
        watched.shot("login")
        assert overflow(page) == 0
        check_accessible(page)
        for token, role in (("wrong", ""), (reader, "read"), (admin, "admin")):
            page.get_by_label("Token").fill(token)
            page.keyboard.press("Enter")
            if not role:
                expect(page.get_by_role("alert")).to_have_text("Invalid token.")
                check_accessible(page)
                continue
            expect(page.locator("#live-text")).to_have_text("live")
            expect(page.get_by_role("button", name="Cancel years")).to_have_count(2 if role == "admin" else 0)
            assert page.evaluate("document.cookie") == "", "no script can read the token"
            page.get_by_role("button", name="Sign out").click()
            expect(page.get_by_label("Token")).to_be_visible()
            assert page.context.cookies() == []
        watched.close()


def test_who_is_signed_out_is_told_and_shown_nothing_as_known(lake: fm.Lake, look: Look) -> None:
    token = new_token()
    with served(lake, tokens=[AccessToken("desk", token_hash(token), "read")]) as client:
        watched = look(str(client.base_url), expected=("status: 401", "status of 401"))
        page = watched.page
        page.get_by_label("Token").fill(token)
        page.keyboard.press("Enter")
        expect(page.locator("#live-text")).to_have_text("live")
        page.context.clear_cookies()
        lake.append("events", rows(1))
        expect_unknown(page, "You are signed out")
        watched.close()
