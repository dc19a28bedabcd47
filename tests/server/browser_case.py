"""A headless Chromium driven by the WebDriver protocol; needs chromium and chromedriver, no Python package."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request

from ports import free_port

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
NEEDED = ("chromium", "chromedriver")


def missing():
    """What is not installed."""
    return [name for name in NEEDED if shutil.which(name) is None]


class Browser:
    """One window."""

    def __init__(self, port, folder, *, hosts=""):
        """hosts: host names and where they lead to, as `--host-resolver-rules` has them."""
        self._base = f"http://127.0.0.1:{port}"
        wait_until(lambda: self._answers(), 30)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += ["--window-size=1440,900", f"--user-data-dir={folder}", "--lang=en"]
        arguments += [f"--host-resolver-rules={hosts}"] if hosts else []
        options = {"args": arguments, "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._base += f"/session/{session['sessionId']}"

    def _answers(self):
        with contextlib.suppress(OSError):
            return self._call("GET", "/status")["ready"]
        return False

    def _call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:600]}") from None

    def open(self, url):
        self._call("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        """What `script` returns, run in the page."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def devtools(self, command, **parameters):
        """A command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, width, height, *, dark=False, phone=False):
        """The size of the page, the system's colours, and a phone's screen."""
        scale = 1.5 if phone else 1
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        wanted = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", features=wanted)

    def press(self, *keys):
        """Presses keys where the focus is; several at a time are held together, the last one first to go up."""
        actions = [{"type": "keyDown", "value": key} for key in keys]
        actions += [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def scroll(self, selector, down):
        """Turns the mouse's wheel over an element; a negative number: upwards."""
        where = {"x": 0, "y": 0, "origin": {ELEMENT: self._find(selector)}}
        turn = {"type": "scroll", "deltaX": 0, "deltaY": down, "duration": 0, **where}
        self._call("POST", "/actions", {"actions": [{"type": "wheel", "id": "wheel", "actions": [turn]}]})

    def double_click(self, selector):
        where = {"type": "pointerMove", "x": 0, "y": 0, "duration": 0, "origin": {ELEMENT: self._find(selector)}}
        click = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._call(
            "POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [where, *click, *click]}]}
        )

    def text(self, selector):
        return self.run("const one = document.querySelector(arguments[0]); return one && one.innerText", selector)

    def shown(self, selector):
        """Texts of the elements that can be seen."""
        script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent).map(e => e.innerText)"
        return self.run(script, selector)

    def type(self, selector, text):
        self._call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def click(self, selector):
        self._call("POST", f"/element/{self._find(selector)}/click", {})

    def _find(self, selector):
        return self._call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def complaints(self):
        """Messages of the browser's console: errors of the script, what the page's policy blocked."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self):
        return base64.b64decode(self._call("GET", "/screenshot"))

    def close(self):
        self._call("DELETE", "")


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout_s:g} s"
        time.sleep(0.05)


@contextlib.contextmanager
def browser(folder, **options):
    """folder: an empty one, for the profile."""
    port = free_port()
    process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        one = Browser(port, folder, **options)
        try:
            yield one
        finally:
            one.close()
    finally:
        process.terminate()
        process.wait(20)
