"""The page and its data: files open to all that load nothing from elsewhere, figures behind the key."""

from __future__ import annotations

import re
import threading

import httpx
from server_case import post, serving, wait_for

from megatron_infer.server.status_page import FILES
from megatron_infer.testing.echo import EchoEngine

KEY = "k-page"


def test_page_needs_no_key_and_its_data_does():
    with serving(api_key=KEY) as case:
        for path, (_, kind) in FILES.items():
            reply = case.http.get(path)
            assert reply.status_code == 200 and reply.headers["content-type"] == kind
        assert case.http.get("/v1/status").status_code == 401
        assert KEY not in "".join(case.http.get(path).text for path in FILES)
        reply = case.http.get("/v1/status", headers={"Authorization": f"Bearer {KEY}"})
        assert reply.json()["status"] == "ok" and reply.headers["cache-control"] == "no-store"


def test_page_loads_nothing_from_elsewhere_and_runs_no_script_from_its_text():
    with serving() as case:
        page = case.http.get("/")
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'" and "unsafe" not in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        asked = re.findall(r'(?:src|href)="([^"]*)"', page.text)
        assert set(asked) == {"data:,", "/static/page.css", "/static/page.js", "/health"}
        assert not re.search(r"<script(?! src=)|\son\w+=|style=", page.text)
        script = case.http.get("/static/page.js").text
        assert not re.search(
            r"innerHTML|insertAdjacentHTML|eval\(|localStorage|sessionStorage|cookie|https?://", script
        )


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
        body = {"prompt": [[1, 2], [3, 4]], "max_tokens": 200, "temperature": 0}
        thread = threading.Thread(target=lambda: post(case, "/v1/completions", **body))
        thread.start()
        wait_for(lambda: sum(one["running"] for one in status()["replicas"]) == 2)
        wait_for(lambda: sum(one["blocks"]["used"] for one in status()["replicas"]) > 0)
        thread.join()
        wait_for(lambda: sum(one["running"] + one["blocks"]["used"] for one in status()["replicas"]) == 0)
        assert sum(one["blocks"]["cached"] for one in status()["replicas"]) > 0, "prefixes are kept"


def test_page_knows_which_controls_are_served():
    with serving(api_key=KEY, control=True) as case:
        case.http.headers["Authorization"] = f"Bearer {KEY}"
        page = case.http.get("/").text
        buttons = re.findall(r'data-path="([^"]*)".*? hidden>', page)
        assert buttons == ["/pause", "/resume", "/sleep", "/wake_up"]
        assert set(buttons) <= set(case.http.get("/v1/status").json()["controls"])
