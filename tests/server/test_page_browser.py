"""The web page in a real browser: Chromium, driven by Playwright."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from page_servers import HOSTILE, PageEngine, page_server
from page_visits import Visits, ask_now, chromium, fits
from playwright.sync_api import Browser, CDPSession, Page, expect
from server_fixtures import Served, live, write_adapter

from loraplex.server.page import adapter_changes

NUM_MORE: Final = 1000
BASE: Final = "<b id=base>base</b>"
API_KEY, ADMIN_KEY = "key-to-ask", "key-to-change"
_DRAW_CHARTS: Final = """async (times) => {
  const charts = await import(new URL("page/charts.js", document.baseURI));
  const nothing = { prompt_tokens_per_s: 0, ttft_s: null, ttft_p95_s: null, itl_s: null, itl_p95_s: null };
  const samples = times.map((at_s) => ({ at_s, tokens_per_s: 0, running: 0, waiting: 0, ...nothing }));
  charts.forget();
  charts.update({ samples, now_s: times.at(-1), num_adapters: 0, tiers: {} });
  return [...document.querySelectorAll("#charts svg")].map((svg) => [
    svg.getAttribute("aria-label"),
    [...svg.querySelectorAll(".tick")].map((tick) => tick.textContent),
  ]);
}"""
"""Draws the charts of samples at these times; returns the label and the marks of each."""
VIEWS: Final = ("chat", "adapters", "server")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module", autouse=True)
def looks_at_once() -> Iterator[None]:
    """Servers look for changes whenever a page asks, not once a second at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_changes, "_MIN_INTERVAL_S", 0.0)
        yield


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a thousand adapters, without keys."""
    served, _ = page_server(tmp_path_factory.mktemp("large"), num_more=NUM_MORE)
    with live(served) as url:
        yield url


class Small:
    """A server of two adapters, with keys."""

    def __init__(self, url: str, served: Served, engine: PageEngine, folder: Path) -> None:
        self.url, self.served, self.engine, self.folder = url, served, engine, folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    folder = tmp_path_factory.mktemp("small")
    options: dict[str, Any] = {"api_keys": (API_KEY,), "admin_keys": (ADMIN_KEY,), "allowed": [folder]}
    served, engine = page_server(folder, base_model=BASE, **options)
    with live(served) as url:
        yield Small(url, served, engine, folder)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visits]:
    visits = Visits(browser)
    yield visits
    visits.close()


def with_keys(visit: Visits, small: Small, *, admin: str = ADMIN_KEY, view: str = "chat") -> Page:
    """Open the page as one whose tab has the keys."""
    page = visit(small.url, keys=(API_KEY, admin), view=view)
    expect(page.locator("#state")).to_have_text("ready")
    return page


def test_two_adapters_stream_side_by_side(visit: Visits, small: Small) -> None:
    """An answer is text, however much it looks like markup, and so is every name."""
    page = with_keys(visit, small)
    expect(page.locator(".model-input").nth(1)).to_have_value("poet")
    answers = page.locator(".answer")
    small.engine.gate.clear()
    page.locator("#prompt").fill("Say it.")
    page.keyboard.press("Enter")
    assert all(small.engine.are_held.acquire(timeout=60) for _ in range(2))
    for column in range(2):
        expect(answers.nth(column)).not_to_be_empty()
        assert len(answers.nth(column).inner_text()) < len(HOSTILE)
    small.engine.gate.set()
    for column in range(2):
        expect(answers.nth(column)).to_have_text(HOSTILE)
        expect(page.locator(".stats").nth(column)).to_contain_text("tok/s")
    expect(page.locator("#model")).to_have_text(BASE)
    assert page.locator(".answer img, .answer script, #base").count() == 0
    assert "owned" not in page.title()


def test_errors_are_shown_where_they_belong(visit: Visits, small: Small) -> None:
    page = with_keys(visit, small)
    page.locator(".model-input").nth(0).fill("pirat")
    page.locator("#prompt").fill("Say it.")
    page.locator("#send").click()
    expect(page.locator(".column").nth(0).locator(".problem")).to_contain_text("did you mean 'pirate'?")
    expect(page.locator(".column").nth(1).locator(".answer")).to_have_text(HOSTILE)
    page.context.set_offline(True)
    expect(page.locator("#banner")).to_contain_text("does not answer")
    page.context.set_offline(False)
    ask_now(page)
    expect(page.locator("#banner")).to_be_hidden()


def test_a_key_is_asked_for_and_kept_in_the_tab_only(visit: Visits, small: Small) -> None:
    page = visit(small.url)
    expect(page.locator("#keys-why")).to_contain_text("asks for a key")
    page.locator("#api-key").fill("another")
    page.keyboard.press("Enter")
    expect(page.locator("#keys-why")).to_contain_text("does not accept")
    page.keyboard.press("Escape")
    expect(page.locator("#banner")).to_contain_text("“Keys” takes one")
    page.locator("#keys-button").click()
    page.locator("#api-key").fill(API_KEY)
    ask_now(page)  # what is typed meanwhile stays
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("ready")
    assert API_KEY in page.evaluate("JSON.stringify(sessionStorage)")
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_the_map_changes_as_adapters_come_move_and_go(visit: Visits, small: Small) -> None:
    write_adapter(small.folder / "sql")
    page = with_keys(visit, small, view="adapters")
    chips, events = page.locator(".chip"), page.locator("#events")
    expect(chips).to_have_text(["pirate", "poet"])
    page.locator("#load-button").click()
    page.locator("#load-name").fill("sql")
    page.locator("#load-path").fill(str(small.folder / "nothing"))
    page.locator("#load-submit").click()
    expect(page.locator("#load-problem")).to_contain_text("nothing")
    page.locator("#load-path").fill(str(small.folder / "sql"))
    page.locator("#load-submit").click()
    expect(chips).to_have_text(["pirate", "poet", "sql"])
    expect(events).to_contain_text("added")
    version = small.served.service.version_of("sql")
    assert version is not None
    small.engine.move(version, "device", num_loads=1)
    ask_now(page)
    expect(chips.nth(2)).to_have_attribute("data-tier", "device")
    expect(events).to_contain_text("loaded to device")
    small.engine.move(version, "host")
    ask_now(page)
    expect(chips.nth(2)).to_have_attribute("data-tier", "host")
    expect(events).to_contain_text("evicted to host memory")
    chips.nth(2).click()
    page.locator("#detail-reload").click()
    expect(page.locator("#load-path")).to_have_value(str(small.folder / "sql"))
    write_adapter(small.folder / "sql", seed=1)
    page.locator("#load-submit").click()
    expect(events).to_contain_text("another version")
    page.locator(".row", has_text="sql").click()
    page.locator("#detail-unload").click()
    page.locator("#detail-unload").click()
    expect(chips).to_have_text(["pirate", "poet"])
    expect(events).to_contain_text("removed")


def count_layouts(page: Page) -> CDPSession:
    """Begin to count how often the browser computes a layout of the page, for `layouts`."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    return session


def layouts(session: CDPSession) -> int:
    figures = session.send("Performance.getMetrics")["metrics"]
    return next(int(each["value"]) for each in figures if each["name"] == "LayoutCount")


def test_a_thousand_adapters_are_scrolled_searched_and_opened_by_keyboard(
    visit: Visits, large: str, record_property: Callable[[str, object], None]
) -> None:
    page = visit(large, view="adapters")
    rows, grid = page.locator(".row:visible"), page.locator("#grid")
    expect(page.locator("#count")).to_have_text("1,002")
    expect(rows.first).to_contain_text("pirate")
    num_rows, session = page.locator(".row").count(), count_layouts(page)
    num_layouts = layouts(session)
    frames = grid.evaluate(
        """async (grid) => {
            const gaps = [];
            let last = performance.now();
            for (let turn = 0; turn < 60; turn++) {
                grid.scrollTop += 600;
                const now = await new Promise(requestAnimationFrame);
                gaps.push(now - last);
                last = now;
            }
            return gaps.sort((one, other) => one - other);
        }"""
    )
    record_property("median_frame_ms", frames[30])
    record_property("slowest_frame_ms", frames[-1])
    # What a frame costs on any machine: it uses the rows that are there, and computes one layout for all of
    # them. (With others, since the page asks the server once a second.)
    assert layouts(session) - num_layouts < 4 * len(frames)
    assert page.locator(".row").count() == num_rows < 60
    expect(rows.filter(has_text="tenant-08").first).to_be_visible()
    assert page.locator("#map canvas").count() == 1
    page.locator("#tab-adapters").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#server")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    page.locator("#search").fill("TENANT-05")
    expect(grid).to_have_attribute("aria-rowcount", "100")
    grid.focus()
    for key in ("ArrowDown", "ArrowDown", "PageDown", "End", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("#detail-title")).to_have_text("tenant-0598")
    page.keyboard.press("Escape")
    expect(page.locator("#detail-dialog")).to_be_hidden()
    page.locator("#search").fill("nobody")
    expect(page.locator("#grid-none")).to_contain_text("“nobody”")


def test_every_view_fits_a_phone_in_both_colour_schemes(visit: Visits, large: str) -> None:
    page = visit(large, width=390)
    expect(page.locator("#state")).to_have_text("ready")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for view in VIEWS:
            page.locator(f"#tab-{view}").click()
            expect(page.locator(f"#{view}")).to_be_visible()
            assert fits(page), view
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness = sum(int(part) for part in colour[4:-1].split(",")) / 3
        assert (lightness < 80) is (scheme == "dark")
    charts = page.locator("#charts svg")
    expect(charts).to_have_count(4)
    assert "Queue over the last " in (charts.nth(3).get_attribute("aria-label") or "")
    page.locator("#tab-chat").click()
    page.locator("#settings summary").click()
    box, prompt = page.locator(".settings-box").bounding_box(), page.locator("#prompt").bounding_box()
    assert box is not None
    assert prompt is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert box["y"] + box["height"] <= prompt["y"], "the prompt can be read beside its settings"


@pytest.mark.parametrize(
    ("seconds", "words", "marks"),
    [
        (0, "minute", ["−1 min", "−45 s", "−30 s", "−15 s"]),
        (60, "minute", ["−1 min", "−45 s", "−30 s", "−15 s"]),
        (61, "two minutes", ["−2 min", "−90 s", "−1 min", "−30 s"]),
        (121, "five minutes", ["−5 min", "−4 min", "−3 min", "−2 min", "−1 min"]),
        (500, "five minutes", ["−5 min", "−4 min", "−3 min", "−2 min", "−1 min"]),
    ],
)
def test_charts_are_of_the_shortest_time_that_has_all_samples(
    visit: Visits, large: str, seconds: int, words: str, marks: list[str]
) -> None:
    page = visit(large, view="server")
    expect(page.locator("#charts .tick", has_text="now")).to_have_count(4)
    drawn = page.evaluate(_DRAW_CHARTS, [0, seconds])
    assert len(drawn) == 4
    for label, ticks in drawn:
        assert f"over the last {words};" in label
        assert [tick for tick in ticks if tick.startswith("−")] == marks


def test_settings_close_and_the_focus_goes_on_when_a_prompt_is_sent(visit: Visits, small: Small) -> None:
    page = with_keys(visit, small)
    box, summary = page.locator(".settings-box"), page.locator("#settings summary")
    summary.click()
    page.locator("#prompt").fill("Say it.")
    expect(box).to_be_visible()
    page.locator("#max-tokens").press("Enter")
    expect(box).to_be_hidden()
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator(".answer").nth(1)).to_have_text(HOSTILE)
    summary.click()
    page.locator("#seed").press("Escape")
    expect(box).to_be_hidden()
    expect(summary).to_be_focused()
    summary.click()
    page.locator("#model").click()
    expect(box).to_be_hidden()
    # A button that goes away leaves its focus to the next.
    small.engine.gate.clear()
    page.locator("#prompt").fill("Say it.")
    page.locator("#send").press("Enter")
    expect(page.locator("#stop")).to_be_focused()
    small.engine.gate.set()
    expect(page.locator("#send")).to_be_focused()
    page.locator(".column .icon").nth(0).press("Enter")
    expect(page.locator(".model-input")).to_be_focused()


def test_dialogs_keep_the_focus_and_give_it_back(visit: Visits, small: Small) -> None:
    page = with_keys(visit, small, admin="", view="adapters")
    expect(page.locator(".chip")).to_have_text(["pirate", "poet"])
    page.locator("#load-button").press("Enter")
    expect(page.locator("#load-name")).to_be_focused()
    for key, focused in (
        ("Shift+Tab", "#load-submit"),
        ("Tab", "#load-name"),
        ("Tab", "#load-path"),
        ("Tab", "#load-dialog [data-close]"),
        ("Tab", "#load-submit"),
    ):
        page.keyboard.press(key)
        expect(page.locator(focused)).to_be_focused()
    page.locator("#load-name").fill("sql")
    page.locator("#load-path").fill(str(small.folder / "nothing"))
    page.locator("#load-submit").press("Enter")
    expect(page.locator("#admin-key")).to_be_focused()  # over the other dialog, which is left as it was
    page.keyboard.press("Escape")
    expect(page.locator("#load-submit")).to_be_focused()
    expect(page.locator("#load-problem")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#load-button")).to_be_focused()
    # What had the focus may be gone: the adapter's square, here.
    page.locator(".chip").nth(1).press("Enter")
    expect(page.locator("#detail-title")).to_have_text("poet")
    page.locator(".chip").nth(1).evaluate("chip => chip.remove()")
    page.keyboard.press("Escape")
    expect(page.locator("#tab-adapters")).to_be_focused()
