"""The page and its data: files open to all that load nothing from elsewhere, figures behind the key."""

from __future__ import annotations

import re
from importlib import resources

import httpx
import pytest
from echo import EchoEngine
from server_case import Background, serving, wait_for

from megatron_infer.server.status_page import FILES

KEY = "k-page"
STATIC = resources.files("megatron_infer.server") / "static"
SCRIPTS = {name: (STATIC / name).read_text(encoding="utf-8") for name, _ in FILES.values() if name.endswith(".js")}


def test_page_needs_no_key_and_its_data_does():
    with serving(api_key=KEY) as case:
        for path, (_, kind) in FILES.items():
            reply = case.http.get(path)
            assert reply.status_code == 200 and reply.headers["content-type"] == kind
        assert case.http.get("/v1/status").status_code == 401
        assert KEY not in "".join(case.http.get(path).text for path in FILES)
        reply = case.http.get("/v1/status", headers={"Authorization": f"Bearer {KEY}"})
        assert reply.json()["status"] == "ok" and reply.headers["cache-control"] == "no-store"


@pytest.mark.security
def test_page_loads_nothing_from_elsewhere_and_runs_no_script_from_its_text():
    with serving() as case:
        page = case.http.get("/")
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert policy["style-src"] == "'self'" and policy["img-src"] == "data:"
        assert policy["frame-ancestors"] == "'none'" and "unsafe" not in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        asked = set(re.findall(r'(?:src|href)="([^"]*)"', page.text))
        assert asked == {"data:,", "#text", "/health", "/static/page.css", "/static/theme.js", "/static/page.js"}
        assert not re.search(r"<script(?! src=)|\son\w+=|style=", page.text)
        assert not re.search(r"url\(|@import|//", case.http.get("/static/page.css").text)


@pytest.mark.security
def test_scripts_never_make_html_of_a_text_and_keep_nothing_but_the_theme():
    parses = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|ContextualFragment|setHTML|srcdoc"
    runs = r"eval\(|Function\(|javascript:|setTimeout\(\s*[\"'`]|sessionStorage|indexedDB|caches\b|cookie"
    for name, script in SCRIPTS.items():
        assert not re.search(f"{parses}|{runs}", script), name
        assert set(re.findall(r"https?://[\w.]+", script)) <= {"http://www.w3.org"}, f"{name}: another site"
        kept = re.findall(r'localStorage\.(?:get|set)Item\("theme"', script)
        assert script.count("localStorage") == len(kept) == (2 if name == "theme.js" else 0)


def test_what_the_scripts_use_is_there():
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    ids, reached = set(re.findall(r'\bid="([^"]*)"', page)), set(re.findall(r'src="/static/([^"]*)"', page))
    for name, script in SCRIPTS.items():
        used = set(re.findall(r'(?:\$|getElementById)\("([^"]*)"\)', script))
        assert used <= ids, f"{name}: {used - ids}"
        reached |= set(re.findall(r'from "\./([^"]*)"', script))
        for names, other in re.findall(r'import \{([^}]*)\} from "\./([^"]*)"', script):
            given = set(
                re.findall(r"^export (?:async )?(?:function\*?|const|class) (\w+)", SCRIPTS[other], re.MULTILINE)
            )
            assert {one.strip() for one in names.split(",")} <= given, f"{name} and {other}"
    assert reached == set(SCRIPTS), "each is loaded, none is missing"
    labels = set(re.findall(r'(?:for|aria-labelledby|aria-describedby)="([^"]*)"', page))
    assert labels <= ids and re.findall(r'href="#(\w+)"', page) == ["text"]


def test_no_other_file_is_served_beside_the_page():
    with serving() as case:
        for path in ("/static/", "/static/page.py", "/static/../page.py", "/static/%2e%2e/page.py", "//etc/passwd"):
            request = httpx.Request("GET", case.url)
            request.url = request.url.copy_with(raw_path=path.encode())
            assert case.http.send(request).status_code == 404, path


def test_status_has_requests_and_blocks_of_each_replica():
    engines = EchoEngine(step_s=0.02, num_blocks=128), EchoEngine(step_s=0.02, num_blocks=64)
    with serving(*engines) as case:

        def status():
            return case.http.get("/v1/status").json()

        wait_for(lambda: sorted(sum(one["blocks"].values()) for one in status()["replicas"]) == [64, 128])
        assert status()["controls"] == [] and status()["model"] == "tiny"
        body = {"prompt": [[1, 2], [3, 4]], "max_tokens": 100, "temperature": 0}
        both = Background(case, "/v1/completions", body)
        wait_for(lambda: sum(one["running"] for one in status()["replicas"]) == 2)
        wait_for(lambda: sum(one["blocks"]["used"] for one in status()["replicas"]) > 0)
        assert both.result().status_code == 200
        wait_for(lambda: sum(one["running"] + one["blocks"]["used"] for one in status()["replicas"]) == 0)
        assert sum(one["blocks"]["cached"] for one in status()["replicas"]) > 0, "prefixes are kept"


def test_page_knows_which_controls_are_served():
    with serving(api_key=KEY, control=True) as case:
        case.http.headers["Authorization"] = f"Bearer {KEY}"
        page = case.http.get("/").text
        buttons = re.findall(r'data-path="([^"]*)".*? hidden>', page)
        assert buttons == ["/pause", "/resume", "/sleep", "/wake_up"]
        assert set(buttons) <= set(case.http.get("/v1/status").json()["controls"])
