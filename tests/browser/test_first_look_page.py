"""The page of a real daemon, as a new user meets it: sources, bad files, feeds, who sent what, one table, the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

import floodmark as fm
from floodmark.serve.http.access import new_token, token_hash
from tests.acceptance.test_run_command import command, running
from tests.acceptance.test_run_daemon import status, until
from tests.browser.conftest import SHOTS, Look
from tests.browser.test_page import check_accessible, overflow

TOKENS = {"collector": new_token(), "reader": new_token()}


@dataclass(frozen=True)
class World:
    folder: Path
    url: str
    client: httpx.Client


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("first")
    with fm.open(folder / "lake", create=True) as lake:
        lake.create_table("events", "id long not null, name string, ts timestamp", partition=["day(ts)"])
    (folder / "drop").mkdir()
    roles = {"collector": "write", "reader": "read"}
    tokens = "".join(
        f'[serve.tokens.{name}]\nsha256 = "{token_hash(text)}"\nrole = "{roles[name]}"\n'
        for name, text in TOKENS.items()
    )
    source = '[sources.inbox]\ntype = "files"\npath = "drop"\ntable = "events"\nevery = "100ms"\nsettle = "100ms"\n'
    (folder / "floodmark.toml").write_text(source + tokens)
    (folder / "drop/good.jsonl").write_text('{"id": 1000, "name": "from a file", "ts": "2026-11-16T00:00:00Z"}\n')
    (folder / "drop/bad.csv").write_text("id,name,ts\n1,a,\nzz,b,\n")
    with running(folder) as (_, client):
        rows = [{"id": n, "name": f"<b>{n}</b>", "ts": f"2026-11-{14 + n % 2}T10:00:00Z"} for n in range(30)]
        client.post(
            "/api/tables/events/rows?wait=committed",
            content="".join(json.dumps(row) + "\n" for row in rows).encode(),
            headers={"Authorization": f"Bearer {TOKENS['collector']}"},
        ).raise_for_status()
        until(lambda: [one for one in tasks(folder) if one["bad_files"] and one["kind"] == "files"])
        until(lambda: [one for one in tasks(folder) if one["kind"] == "feed" and one["last_ended"]])
        yield World(folder, str(client.base_url), client)


def tasks(folder: Path) -> list[dict[str, object]]:
    return list(status(folder)["daemon"]["tasks"])


def shot(name: str) -> Path:
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS / f"{name}.png"


def lefts(page: Page, selector: str) -> list[float]:
    """Where the text of each begins."""
    script = "all => all.map(one => one.getBoundingClientRect().left + parseFloat(getComputedStyle(one).paddingLeft))"
    found: list[float] = page.locator(selector).evaluate_all(script)
    return found


@pytest.fixture
def page(world: World, look: Look) -> Page:
    page = look(f"{world.url}/login").page
    page.get_by_label("Token").fill(TOKENS["reader"])
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#health .word")).to_be_visible()
    return page


def test_bad_files_of_a_drop_folder_are_named_in_status_with_line_reason_and_place(world: World) -> None:
    (task,) = [one for one in tasks(world.folder) if one["kind"] == "files"]
    assert task["set_aside"] == 1
    (bad,) = task["bad_files"]  # type: ignore[misc]
    place = str(world.folder / "drop/.failed/bad.csv")
    assert (bad["file"], bad["line"], bad["path"]) == ("bad.csv", 3, place)
    assert "not the table's int64" in bad["reason"]
    assert Path(place).is_file()
    code, text = command(world.folder, "--lake", "lake", "status")
    assert code == 0
    assert "bad file bad.csv, line 3: a value is not the table's int64" in text
    assert f"(in {place})" in text
    assert "see below" in text
    assert "`floodmark status`" not in text


def test_drop_folders_are_among_the_sources_and_name_their_bad_files(page: Page, world: World) -> None:
    source = page.locator('#ways-in [data-source="source inbox"]')
    expect(source).to_contain_text("files into events")
    expect(source).to_contain_text(str(world.folder / "drop"))
    expect(source.locator(".state")).to_have_text("1 bad file")
    expect(source).to_contain_text("bad.csv, line 3: a value is not the table's int64")
    expect(source).to_contain_text(str(world.folder / "drop/.failed/bad.csv"))
    page.screenshot(path=shot("sources"), full_page=True)


def test_a_feed_that_ran_is_not_called_not_run_yet(page: Page) -> None:
    feed = page.locator('#tasks [data-task="feed events"]')
    expect(feed).to_contain_text("30 rows fed")
    expect(feed).not_to_contain_text("not run yet")


def test_commits_over_http_show_the_name_of_the_token(page: Page) -> None:
    commit = page.locator("#commits .commit", has_text="events +30")
    expect(commit.locator(".who")).to_have_text("collector")


def test_example_commands_name_columns_that_the_table_has(page: Page) -> None:
    expect(page.locator("#jobs code")).to_have_text("floodmark backfill column events day 'date(ts)'")


def test_a_tables_name_leads_to_its_schema_partitions_files_history_and_sample_rows(page: Page, world: World) -> None:
    page.locator("#tables").get_by_role("link", name="events").click()
    expect(page).to_have_title("events – Floodmark")
    expect(page.locator("#columns tbody tr")).to_have_count(3)
    expect(page.locator("#columns tbody")).to_contain_text("timestamptz")
    expect(page.locator("#partitions tbody tr")).to_have_count(3)
    expect(page.locator("#partitions tbody")).to_contain_text("2026-11-15")
    expect(page.locator("#files tbody tr")).to_have_count(3)
    expect(page.locator("#sample tbody tr")).to_have_count(20)
    expect(page.locator("#sample h2")).to_contain_text("20 rows of 31")
    # What is in a row is shown, never interpreted.
    expect(page.locator("#sample tbody")).to_contain_text("<b>")
    expect(page.locator("#history tbody tr", has_text="collector")).to_contain_text("+30")
    for part in ("columns", "sample", "partitions", "files", "history"):
        heads, cells = (lefts(page, f"#{part} {row} > *") for row in ("thead tr", "tbody tr:first-child"))
        assert heads == cells, part
    check_accessible(page)
    page.screenshot(path=shot("table"), full_page=True)
    page.set_viewport_size({"width": 375, "height": 800})
    assert overflow(page) <= 0
    page.get_by_role("link", name="The lake", exact=True).click()
    expect(page.locator("#health .word")).to_be_visible()


def test_a_table_that_is_not_there_has_a_page_that_says_so_and_strangers_sign_in_first(
    world: World, look: Look
) -> None:
    answer = world.client.get("/tables/events", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    known = {"Authorization": f"Bearer {TOKENS['reader']}"}
    missing = world.client.get("/tables/nothing", headers=known)
    assert (missing.status_code, "there is no such table" in missing.text.lower()) == (404, True)
    assert world.client.get("/tables/a%20b", headers=known).status_code == 404


def test_the_docs_of_the_api_come_from_the_server_alone(world: World, look: Look) -> None:
    """`look` complains of any request to another place."""
    page = look(f"{world.url}/docs").page
    section = page.locator("section.api", has_text="/api/tables/{table}/rows").first
    expect(section).to_contain_text("Receive rows, one JSON object per line")
    expect(section).to_contain_text("Idempotency-Key")
    document = world.client.get("/openapi.json").json()
    operations = sum(len(methods) for methods in document["paths"].values())
    expect(page.locator("section.api")).to_have_count(operations + 1)
    expect(page.locator('[id^="form-"][id$="-head"]')).to_have_count(len(document["components"]["schemas"]))
    section.get_by_role("link", name="TakenRows").click()
    expect(page.locator("#form-TakenRows")).to_be_in_viewport()
    check_accessible(page)
    page.screenshot(path=shot("docs"))
    page.set_viewport_size({"width": 375, "height": 800})
    assert overflow(page) <= 0
