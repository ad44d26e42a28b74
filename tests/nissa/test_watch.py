"""`esper watch`: a page for this machine alone, that follows a run."""

import json
import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection

import pytest

from esper.cli import main
from esper.nissa.watch_server import make_server
from support.training_configs import ORACLE, flags


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    main(["train", *flags(replace(ORACLE, rounds=3)), "--out", str(folder / "a")])
    shutil.copytree(folder / "a", folder / "b")
    return folder


@contextmanager
def served(path):
    with make_server(path) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def get(port, path, host="127.0.0.1"):
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_server_answers_with_the_page_the_runs_and_each_run(runs):
    with served(runs) as port:
        assert get(port, "/")[0] == 200
        assert json.loads(get(port, "/runs")[1]) == ["a", "b"]
        status, text = get(port, "/run?name=a&round=2&with=b")
        view = json.loads(text)
        assert (status, view["round"], view["other"]["name"]) == (200, 2, "b")
        assert view["comparison"][0][0] == "rounds"
        assert view["warnings"] == []


def test_other_paths_runs_and_host_names_are_refused(runs):
    with served(runs) as port:
        for path in ("/run?name=../a", "/run?name=a&round=x", "/run", "/etc/passwd", "/..%2f"):
            assert get(port, path)[0] == 404, path
        assert get(port, "/", host="evil.example:8770")[0] == 403


def test_the_page_loads_nothing_from_elsewhere(runs):
    with served(runs) as port:
        page = get(port, "/")[1]
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "innerHTML" not in page


def test_a_folder_without_runs_and_a_port_in_use_are_one_line(tmp_path, runs):
    with pytest.raises(SystemExit, match="no run in"):
        main(["watch", str(tmp_path)])
    with served(runs) as port, pytest.raises(SystemExit, match=f"port {port} cannot be used"):
        main(["watch", str(runs), "--port", str(port), "--no-browser"])
    with pytest.raises(SystemExit, match="port 99999 cannot be used"):
        main(["watch", str(runs), "--port", "99999", "--no-browser"])
    with pytest.raises(SystemExit, match="is not the folder of a run: it has no run.sqlite"):
        main(["compare", str(tmp_path), str(runs)])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_a_run_and_follows_it(width, scheme, runs, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    errors = []
    with served(folder) as port, sync_api.sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        with playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]) as browser:
            size = {"width": width, "height": 900}
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_selector("#hosts button")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("#state").inner_text().startswith("finished, 3 rounds")
            page.keyboard.press("ArrowLeft")
            sync_api.expect(page.locator("#round")).to_have_text("round 2")
            page.locator("#hosts button").first.focus()
            page.keyboard.press("Enter")
            assert page.locator("#decisions tr").count() == 1 + ORACLE.growth.num_steps
            page.select_option("#b", "b")
            sync_api.expect(page.locator("#compared h2")).to_have_text("Side by side")
            before = page.evaluate("getComputedStyle(document.body).backgroundColor")
            page.click("#theme")
            page.reload()
            after = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert before != after
    assert not errors
