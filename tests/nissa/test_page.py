"""The ledger's page: one file that needs nothing else, whatever the run and its names were."""

import errno
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import pytest

import esper
from esper.nissa.ledger import (
    BlockRecord,
    DecisionRecord,
    FateRecord,
    Ledger,
    NetworkRecord,
    TrialRecord,
    TwinRecord,
    Verdict,
)
from esper.nissa.page import page_data, page_html, write_page
from support.ledgers import NETWORK, full_ledger, new_ledger, seed, state, step

ODD = '</script><script>alert("1")</script><b>&amp; {{data}} \u2028'


class Reader(HTMLParser):
    """Tags, what they fetch, and the text inside each kind of element."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._open.append(tag)
        self.links += [
            value for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)


def embedded(page: str) -> dict:
    return json.loads(Reader(page).texts["script"][0])


def odd_ledger() -> Ledger:
    """Every name that a user can choose is odd."""
    block = BlockRecord(name=ODD, kind=ODD, shape=(8,), params=1, site_kind="VECTOR")
    ledger = new_ledger(
        model=ODD,
        metric=ODD,
        controller=ODD,
        before=NetworkRecord(params=1, macs=1, blocks=(block,)),
        facts={ODD: ODD},
    )
    ledger.steps.append(step(0))
    ledger.seeds.append(seed("a", born=0, site=ODD))
    ledger.decisions.append(DecisionRecord(step=0, op="GERMINATE", site=ODD, seed="a", reason=ODD))
    ledger.steps.append(step(1, state("a", "BLENDING", 0.5)))
    ledger.fates.append(FateRecord(seed="a", step=1, fate="pruned", reason=ODD))
    return ledger


def adapted_ledger() -> Ledger:
    ledger = new_ledger()
    for plan, proposer in (("nothing", ODD), (ODD, "a usual rule"), ("seed input", ODD)):
        trial = TrialRecord(plan=plan, rate=0.001, proposer=proposer, params=337)
        ledger.trials.append(replace(trial, metric=0.5, loss=math.nan, trained=337, seconds=2.0))
    ledger.trials[-1] = trial  # in training
    return ledger


def long_ledger(num_steps: int, num_sites: int = 20) -> Ledger:
    ledger = new_ledger()
    sites = tuple(f"encoder.layers.{number}.feed_forward" for number in range(num_sites))
    for number in range(num_steps):
        alive = [state(f"s{k}", "HOLDING", 1.0) for k in range(10) if number > 20 * k]
        ledger.steps.append(step(number, *alive, metric=number / num_steps))
        ledger.twin.append(TwinRecord(step=number, metric=0.5))
        if number % 20 == 0 and number < 200:
            ledger.seeds.append(seed(f"s{number // 20}", born=number, site=sites[0]))
        ledger.decisions.append(DecisionRecord(step=number, op="WAIT", legal={"GERMINATE": sites}))
    return ledger


@pytest.mark.parametrize("ledger", [new_ledger(), full_ledger(), odd_ledger(), adapted_ledger()])
def test_the_page_fetches_nothing(ledger):
    page = page_html(ledger)
    reader = Reader(page)
    assert reader.links == []
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(reader.tags)
    assert "url(" not in re.sub(r"url\(#\w+\)", "", page)  # a reference inside the page is fine
    assert "@import" not in page
    # a namespace is a name, not an address that anybody opens
    assert set(re.findall(r"\w+://[^\s\"'`]+", page)) <= {"http://www.w3.org/2000/svg"}
    for call in ("fetch(", "XMLHttpRequest", "import(", "WebSocket", "sendBeacon", "eval("):
        assert call not in page


def test_every_part_is_in_the_page():
    page = page_html(full_ledger())
    parts = resources.files("esper.nissa").joinpath("page_parts").iterdir()
    scripts = [part.read_text() for part in parts if part.name.endswith(".js")]
    assert len(scripts) == 6
    _, code = Reader(page).texts["script"]
    assert all(script in code for script in scripts)
    assert code.index("const data =") < code.index("function drawTime") < code.index("drawHead();")
    ids = set(re.findall(r' id="(\w+)"', page))
    assert set(re.findall(r'\$\("(\w+)"\)', code)) <= ids  # what the script looks for is there
    assert "{{" not in re.sub(r"<script>.*</script>", "", page, flags=re.S)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_parses(tmp_path):
    script = tmp_path / "page.js"
    script.write_text(Reader(page_html(full_ledger())).texts["script"][1])
    subprocess.run(["node", "--check", script], check=True)


def test_the_json_beside_the_page_is_the_ledger(tmp_path):
    ledger = full_ledger()
    for given in ("run.2.html", "run.2"):
        page = write_page(ledger, tmp_path / given / given)
        assert page == tmp_path / given / "run.2.html"
        assert Ledger.read(tmp_path / given / "run.2.json") == ledger


def test_a_failed_write_leaves_the_earlier_page_and_ledger(tmp_path, monkeypatch):
    write_page(full_ledger(), tmp_path / "run")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_page(full_ledger(), tmp_path / "run")
    with pytest.raises(OSError, match="No space left"):
        full_ledger().write(tmp_path / "run.json")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_odd_names_are_text_and_nothing_else():
    page = page_html(odd_ledger())
    reader = Reader(page)
    plain = Reader(page_html(full_ledger()))
    assert reader.tags == plain.tags  # no name has become an element
    assert embedded(page)["model"] == ODD
    assert embedded(page)["seeds"][0]["site"] == ODD
    assert "".join(reader.texts["title"]) == f"{ODD}, grown"


def test_the_page_never_parses_text_as_markup():
    """Names reach the page through the script, which must set them as text."""
    page = page_html(full_ledger())
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
        assert way not in page


def test_an_empty_run_has_a_page():
    data = embedded(page_html(new_ledger()))
    assert data["steps"] == data["seeds"] == data["events"] == []
    assert data["verdict"] is None
    assert "not over" in data["summary"]


def test_a_run_of_a_thousand_steps_stays_small():
    short, long = (len(page_html(long_ledger(n))) for n in (50, 1000))
    assert long < 300_000
    assert long - short < 200 * 950  # bytes per further step


def test_what_the_page_shows_is_what_the_ledger_says():
    ledger = full_ledger()
    data = page_data(ledger)
    assert data["summary"] == ledger.summary()
    assert data["before"]["params"] == NETWORK.params
    assert data["budget"] == {"params": 2000, "macs": None}
    assert [row[0] for row in data["steps"]] == list(range(10))
    pruned, kept = data["seeds"]
    assert (pruned["fate"], pruned["fateStep"], pruned["why"]) == ("pruned", 2, "does not pay")
    assert pruned["gains"] == [(2, -0.01, None)]
    assert pruned["alphas"] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert kept["life"] == ledger.life_of("b")
    assert kept["alphas"] == [
        (4, 0.0),
        (5, 0.5),
        (6, 1.0),
        (9, 1.0),
    ]  # level stretches are left out
    (event,) = data["events"]
    assert (event["op"], event["legal"]) == ("GERMINATE", {"WAIT": 0, "GERMINATE": 1})
    assert (event["before"], event["next"]) == (0.5, 0.5)
    assert data["rollbacks"] == [[3, 0, "loss is not finite"]]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("name", ["accuracy", "1 / (1 + loss)"])
def test_the_page_rounds_as_the_ledger_does(name):
    """Halves above all: 0.8125 is 81.3% here and there."""
    ledger = Ledger(model="net", metric=name, controller="heuristic", before=NETWORK)
    values = [0.8125, 0.8135, 0.9995, 0.0005, 0.015625, 0.046875, 1 / 3, 0.25, 0.0]
    basics = resources.files("esper.nissa").joinpath("page_parts", "basics.js").read_text()
    script = f"""
        const document = {{getElementById: () => ({{textContent: {json.dumps(json.dumps(page_data(ledger)))}}})}};
        {basics}
        const values = {values};
        console.log(JSON.stringify(values.map((v) => [metric(v), gain(-v - 0.001, v)])));
    """
    shown = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    plain = shown.stdout.replace("\u2212", "-").replace("\u00a0", " ").replace("\u00b1", "+-")
    expected = [[ledger.show(v), ledger.show_gain(-v - 0.001, v)] for v in values]
    assert json.loads(plain) == expected


FAKE_PAGE = """
    class Node {
      constructor(text) { this.own = text; this.children = []; }
      append(...children) { this.children.push(...children); }
      setAttribute() {}
      get text() { return this.own + this.children.map((c) => c.text ?? c).join(" "); }
    }
    const nodes = {data: {textContent: DATA}, waits: {}, decisions: new Node("")};
    const document = {
      getElementById: (id) => nodes[id],
      createElement: () => new Node(""),
      createElementNS: () => new Node(""),
    };
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("with_decisions", [True, False])
def test_rollbacks_are_listed_with_their_reason(with_decisions):
    data = page_data(full_ledger())
    data["events"] = data["events"] if with_decisions else []
    parts = resources.files("esper.nissa").joinpath("page_parts")
    scripts = [parts.joinpath(name).read_text() for name in ("basics.js", "sections.js")]
    fake = FAKE_PAGE.replace("DATA", json.dumps(json.dumps(data)))
    script = "\n".join([fake, *scripts, "drawDecisions(); console.log(nodes.decisions.text)"])
    shown = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert "3 Rolled back to step 0 loss is not finite" in " ".join(shown.stdout.split())


def test_waits_are_counted_not_listed():
    ledger = long_ledger(50)
    data = page_data(ledger)
    assert (data["waits"], data["events"]) == (50, [])


def test_a_verdict_reaches_the_page():
    ledger = new_ledger()
    verdict = Verdict(grown=0.7, ungrown=0.8, returned="ungrown", difference_error=0.01)
    ledger.after, ledger.verdict = NetworkRecord(params=1058, macs=8000), verdict
    page = page_html(ledger)
    assert embedded(page)["verdict"] == {
        "grown": 0.7,
        "ungrown": 0.8,
        "difference_error": 0.01,
        "returned": "ungrown",
        "repeats": 1,
    }
    assert "Growing did not help" in "".join(Reader(page).texts["p"])  # readable without the script


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("returned", ["grown", "ungrown"])
def test_the_tiles_show_the_network_that_was_returned(returned):
    ledger = full_ledger()
    ledger.after = NetworkRecord(params=NETWORK.params + 500, macs=8000)
    ledger.verdict = Verdict(grown=0.7, ungrown=0.8, returned=returned, difference_error=0.01)
    parts = resources.files("esper.nissa").joinpath("page_parts")
    scripts = [parts.joinpath(name).read_text() for name in ("basics.js", "sections.js")]
    fake = FAKE_PAGE.replace("DATA", json.dumps(json.dumps(page_data(ledger))))
    script = "\n".join(
        [
            fake,
            "nodes.tiles = new Node('');",
            *scripts,
            "drawTiles(); console.log(nodes.tiles.text)",
        ]
    )
    shown = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    text = " ".join(shown.stdout.split())
    is_grown = returned == "grown"
    params = NETWORK.params + 500 * is_grown
    assert f"Parameters {params:,}" in text
    assert f"Seeds kept {int(is_grown)} of 2" in text
    assert ("the ungrown network was returned" in text) != is_grown


def test_the_footer_says_when_and_by_what_the_page_was_written():
    written = page_data(new_ledger())["written"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", written["written"])
    assert written["esper"] == esper.__version__


LINKED_PAGE = """
    class Node {
      constructor(tag) { this.tag = tag; this.children = []; this.found = {}; this.classList = {toggle() {}}; }
      append(...children) { this.children.push(...children); }
      replaceChildren(...children) { this.children = children; }
      after(node) { this.append(node); }
      prepend(node) { this.append(node); }
      setAttribute(name, value) { this.found[name] = value; }
      removeAttribute() {}
      all(name) { return [this.found[name], ...this.children.flatMap((c) => c.all?.(name) ?? [])]; }
    }
    const nodes = {data: {textContent: DATA}};
    const document = {
      getElementById: (id) => (nodes[id] ??= Object.assign(new Node(id), {clientWidth: 900})),
      createElement: (tag) => new Node(tag),
      createElementNS: (_, tag) => new Node(tag),
    };
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    ("ledger", "draw", "cards"),
    [
        (full_ledger(), "drawSeeds(); drawTime();", ["seed-b", "seed-a"]),
        (adapted_ledger(), "drawAdaptation(); drawPlans();", ["plan-0", "plan-1", "plan-2"]),
    ],
)
def test_the_bars_of_the_chart_link_to_the_cards(ledger, draw, cards):
    parts = resources.files("esper.nissa").joinpath("page_parts")
    names = ("basics.js", "chart.js", "sections.js", "plans.js", "network.js")
    fake = LINKED_PAGE.replace("DATA", json.dumps(json.dumps(page_data(ledger))))
    show = """console.log(JSON.stringify([$("time").all("href"), $("seeds").all("id")]))"""
    script = "\n".join([fake, *(parts.joinpath(name).read_text() for name in names), draw, show])
    shown = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    links, ids = ([entry for entry in found if entry] for found in json.loads(shown.stdout))
    assert ids == cards
    assert sorted(links) == sorted(f"#{card}" for card in cards)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_follows_an_adaptation_and_the_keyboard_reaches_its_plans(width, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    path, errors = write_page(adapted_ledger(), tmp_path / "run.html", "a usual rule"), []
    with sync_api.sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        with playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]) as browser:
            page = browser.new_page(viewport={"width": width, "height": 800})
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(path.as_uri())
            assert page.locator("#now").inner_text() == "Now: a usual rule."
            page.locator("#theme").focus()
            for _ in range(3):
                page.keyboard.press("Tab")
            page.keyboard.press("Enter")
            assert page.evaluate("document.querySelector(':target').id") == "plan-2"
            assert "running now" in page.locator("#plan-2").inner_text()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.locator("#time a").nth(1).focus()
            ledger = adapted_ledger()
            ledger.trials[-1] = replace(
                ledger.trials[-1], metric=1.0, loss=0.1, trained=337, seconds=1.0
            )
            ledger.after = NETWORK
            write_page(ledger, path)
            page.wait_for_function("!document.body.innerText.includes('running now')", timeout=9000)
            assert page.evaluate("document.activeElement.getAttribute('href')") == "#plan-1"
    assert not errors


@pytest.mark.slow
def test_a_browser_folds_removed_seeds_links_to_them_and_remembers_the_theme(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    path, errors = write_page(full_ledger(), tmp_path / "run.html"), []
    with sync_api.sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        with playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]) as browser:
            page = browser.new_page(viewport={"width": 390, "height": 800})
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(path.as_uri())
            pruned = page.locator("details article")
            assert pruned.count() == 1
            assert not pruned.is_visible()
            assert "if switched off" in page.locator("#seeds article").first.inner_text()
            assert "ungrown" in page.locator("#legend").inner_text()
            background = "getComputedStyle(document.body).backgroundColor"
            before = page.evaluate(background)
            page.click("#theme")
            page.reload()
            assert page.evaluate(background) != before
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not errors
