"""The web page of a fleet in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from page_servers import PageFleet, page_server
from page_visits import Visits, ask_now, chromium, fits
from playwright.sync_api import Browser, Locator, Page, expect
from server_fixtures import live
from server_process import PATIENCE_S, complete, serving

from loraplex.server.served_adapter import ServedAdapter

VIEWS = ("chat", "adapters", "server")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visits]:
    visits = Visits(browser)
    yield visits
    visits.close()


def card(page: Page, title: str) -> Locator:
    return page.locator("#server-cards .card").filter(has=page.get_by_role("heading", name=title))


@pytest.mark.parametrize("width", [390, 1280])
def test_replicas_and_plan_are_read_without_scrolling_aside(
    visit: Visits, tmp_path: Path, width: int
) -> None:
    long_name = "a-long-name-of-an-adapter-" * 6
    fleet = PageFleet(
        {"version-of-pirate": [0, 1, 2], "version-of-poet": [1], f"version-of-{long_name}": [1]}
    )
    served, engine = page_server(tmp_path, fleet=fleet, names=("pirate", "poet", long_name))
    for version in fleet.held:
        engine.move(version, "host", num_loads=1)
    poet = engine.adapters["version-of-poet"]
    served.service._served["verse"] = ServedAdapter(name="verse", spec=poet)
    with live(served) as url:
        page = visit(url, width=width, view="server")
        replicas, plan = card(page, "Replicas"), card(page, "Plan in force")
        expect(replicas.locator("tbody tr")).to_have_count(3)
        expect(replicas).to_contain_text("3 of 3 take requests")
        assert fits(page)
        which = plan.locator("tbody tr").nth(1).locator("td").last
        expect(which).to_contain_text(long_name)
        assert "poet" in which.inner_text()
        box = which.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= width
        # Two names of one version take its rank and bytes once.
        numbers = plan.locator("tbody tr").nth(1).locator("td.num").all_inner_texts()
        ranks = sum(spec.max_rank for spec in engine.adapters.values())
        assert numbers == ["4", str(ranks), "12.0 KiB", "0"]
        titles = (
            plan.locator("tbody td").nth(1).evaluate("cell => getComputedStyle(cell, '::before').content")
        )
        assert titles == ('"Adapters"' if width == 390 else "none")
        httpx.post(f"{url}/v1/fleet/drain", json={"replica": 1}).raise_for_status()
        ask_now(page)
        expect(replicas.locator("tbody tr").nth(1)).to_contain_text("ready, drained")
        expect(replicas).to_contain_text("2 of 3 take requests")
        charts = page.locator("#charts svg")
        expect(charts.locator(".tick", has_text="now")).to_have_count(4)
        page.locator("#tab-adapters").click()
        expect(page.locator(".field h3")).to_have_text(
            [
                "Replica 0 · ready · 0 in flight · 1 adapter",
                "Replica 1 · drained · 0 in flight · 4 adapters",
                "Replica 2 · ready · 0 in flight · 1 adapter",
            ]
        )
        where = page.locator(".row", has_text="pirate").locator(".where")
        expect(where).to_have_text("3 replicas")
        expect(where).to_have_attribute("title", "replicas 0, 1, 2")
        expect(page.locator("#grid-head span").nth(3)).to_have_text("Size, summed")
        expect(page.locator(".field").nth(0).locator('.chip[data-tier="host"]')).to_have_text(["pirate"])
        assert fits(page)


@pytest.mark.slow
def test_the_page_of_a_real_fleet(visit: Visits, folder: Path, tmp_path: Path) -> None:
    """It chats, shows where adapters are, the plan and the twin, and follows a load and a drained replica."""
    options = ("--adapters", str(folder / "adapters"), "--allow-adapter-dir", str(folder / "more"))
    options = (*options, "--state-dir", str(tmp_path), "--replicas", "2", "--placement", "auto")
    options = (*options, "--period", "1", "--shadow-twin-every", "1")
    with serving(folder, *options, command="fleet serve") as (_, url, _):
        for model in ("tiny", "one", "two"):
            complete(url, model)
        page = visit(url)
        expect(page.locator(".column")).to_have_count(2)
        page.locator("#prompt").fill("the dog")
        page.keyboard.press("Enter")
        for column in range(2):
            expect(page.locator(".answer").nth(column)).not_to_be_empty()
            expect(page.locator(".stats").nth(column)).to_contain_text("tok/s")
        expect(page.locator("#send")).to_be_visible()
        page.locator("#tab-adapters").click()
        expect(page.locator(".field")).to_have_count(2)
        page.locator("#load-button").click()
        page.locator("#load-name").fill("three")
        page.locator("#load-path").fill(str(folder / "more" / "three"))
        page.locator("#load-submit").click()
        expect(page.locator(".field").nth(0).locator(".chip")).to_have_text(["one", "three", "two"])
        complete(url, "three")
        expect(page.locator('.chip[data-tier="host"]', has_text="three").first).to_be_visible()
        expect(page.locator("#events")).to_contain_text("loaded by replica")
        page.locator("#tab-server").click()
        expect(card(page, "Plan in force")).to_contain_text("three")
        expect(card(page, "The twin's picture")).to_contain_text("requests replayed")
        assert "–" not in card(page, "The twin's picture").locator("tbody").inner_text()
        drained = httpx.post(f"{url}/v1/fleet/drain", json={"replica": 1}, timeout=PATIENCE_S)
        assert drained.status_code == 200
        expect(card(page, "Replicas")).to_contain_text("1 of 2 take requests")
        expect(card(page, "Plan in force").locator("tbody tr").nth(1)).to_contain_text("none")
        complete(url, "two")
        page.set_viewport_size({"width": 390, "height": 844})
        for view in VIEWS:
            page.locator(f"#tab-{view}").click()
            expect(page.locator(f"#{view}")).to_be_visible()
            assert fits(page), view
