"""Chromium without a window, driven by its DevTools protocol over pipes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import pytest
from waiting import wait_for

_START = "import os, sys; r, w, *command = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4)"
_START += "; os.set_inheritable(3, True); os.set_inheritable(4, True); os.execvp(command[0], command)"
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
_OPTIONS += ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars")
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowRight": (39, ""), "Tab": (9, "")}
CTRL, SHIFT = 2, 8


def executable():
    """The path of Chromium; skips where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    return path


class Failed(Exception):
    """A command that the browser cannot run, such as one for a page that is being left."""


class Page:
    """A page in a browser of its own. requests: the addresses that it has asked for; violations: of its policy."""

    def __init__(self, read, write):
        self._read, self._write, self._count, self._rest = read, write, 0, b""
        self.requests, self.violations, self._session = [], [], None
        (target,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def resize(self, width, height, *, dark=False):
        """Sets the size of the screen, and its scheme of colors."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method, **parameters):
        """The result of a command."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != self._count:
            self._note(message)
        if "error" in message:
            raise Failed(method, message["error"])
        return message["result"]

    def _next(self):
        while b"\0" not in self._rest:
            part = os.read(self._read, 2**16)
            assert part, "Chromium has ended"
            self._rest += part
        raw, _, self._rest = self._rest.partition(b"\0")
        return json.loads(raw)

    def _note(self, message):
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["source"] == "security":
            self.violations.append(message["params"]["entry"]["text"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.violations.append(json.dumps(message["params"]["exceptionDetails"]))

    def run(self, expression):
        """The value of an expression of JavaScript, awaited if it is a promise."""
        out = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in out, (expression, out["exceptionDetails"])
        return out["result"].get("value")

    def wait(self, condition):
        """Waits until an expression is true, also of a page that is still to come."""
        expression = f"(() => {{ try {{ return Boolean({condition}) }} catch {{ return false }} }})()"

        def holds():
            with contextlib.suppress(Failed):
                return self.call("Runtime.evaluate", expression=expression)["result"]["value"]

        wait_for(holds)

    def open(self, url):
        """Loads a page on a wide screen; forgets what was recorded."""
        self.resize(1280, 800)
        self.requests.clear()
        self.violations.clear()
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def type(self, text):
        """Types text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key, modifiers=0):
        """Presses and releases a key."""
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        down = {"text": text} if text and not modifiers & CTRL else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def point(self, selector):
        """Moves the pointer to the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.run(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        """Clicks an element."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector):
        """The visible text of an element; None where there is none."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? null")

    def picture(self):
        """A PNG of the page, in base64."""
        return self.call("Page.captureScreenshot", format="png")["data"]


@contextlib.contextmanager
def page(profile):
    """A page in a new browser. profile: a new folder for its files."""
    command = (executable(), *_OPTIONS, f"--user-data-dir={profile}", "about:blank")
    (their_read, write), (read, their_write) = os.pipe(), os.pipe()
    command = (sys.executable, "-c", _START, str(their_read), str(their_write), *command)
    browser = subprocess.Popen(command, pass_fds=(their_read, their_write), stderr=subprocess.DEVNULL)
    os.close(their_read), os.close(their_write)
    try:
        yield Page(read, write)
    finally:
        browser.kill()
        browser.wait()
        os.close(read), os.close(write)
