"""A browser for tests: Debian's chromium, driven over its own pipe.

`--remote-debugging-pipe` speaks the DevTools protocol over two file descriptors, as
JSON with a zero byte after each message; so there is no port, no driver and no library
to install. One process serves all tests.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--force-color-profile=srgb", "--remote-debugging-pipe", "about:blank"),
)
TIMEOUT_S = 120.0
"""Seconds until a browser that does not answer is said to hang."""


def find():
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class DoesNotRun(Exception):
    """There is a browser, but it ends before it has said a word."""


class Browser:
    """A headless browser with one tab."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        hears, says = os.pipe(), os.pipe()
        # High numbers first: what is given to the browser must not be 3 or 4 already.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (hears[0], says[1])]

        def prepare():
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self.process = subprocess.Popen(
            [find(), *FLAGS, f"--user-data-dir={self.profile.name}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=prepare,
        )
        for fd in (*theirs, hears[0], says[1]):
            os.close(fd)
        self.out, self.into = hears[1], says[0]
        self.number, self.rest = 0, b""
        self.session = None
        self.complaints = []
        try:
            self.call("Browser.getVersion")
        except (AssertionError, BrokenPipeError) as why:
            self.close()
            result = f"{find()} ended with {self.process.returncode}: {why}"
            raise DoesNotRun(result) from why
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Ask for something and wait for the answer; errors are raised."""
        self.number += 1
        asked = {"id": self.number, "method": method, "params": params}
        if self.session:
            asked["sessionId"] = self.session
        os.write(self.out, json.dumps(asked).encode() + b"\0")
        while True:
            outcome = self._hear()
            if outcome.get("id") == self.number:
                assert "error" not in outcome, f"{method}: {outcome['error']}"
                return outcome["result"]
            self._note(outcome)

    def _hear(self):
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], 1.0)
            if ready:
                read = os.read(self.into, 1 << 20)
                assert read, "the browser has ended"
                self.rest += read
            assert time.monotonic() < deadline, "the browser does not answer"
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message):
        """Keep what a page complains of: errors, warnings, exceptions."""
        about = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(about["exceptionDetails"])
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning"):
                self.complaints.append(about["args"])
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.complaints.append(about["entry"])

    def window(self, width=1180, height=900, *, theme="light", calm=False):
        """The size of the page, and what its reader prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", mobile=phone, **size)
        motion = "reduce" if calm else "no-preference"
        wishes = [
            {"name": "prefers-color-scheme", "value": theme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.call("Emulation.setEmulatedMedia", features=wishes)

    def open(self, address, ready):
        """Load a page and wait until the expression `ready` holds, and it is painted.

        Until then the browser may drop keys, which no reader can press so early.
        """
        self.run("window.stale = true")
        self.complaints.clear()
        result = self.call("Page.navigate", url=address)
        assert not result.get("errorText"), result
        self.wait(f"!window.stale && ({ready})")
        frame = "requestAnimationFrame"
        self.run(f"new Promise((done) => {frame}(() => {frame}(done)))")

    def run(self, code):
        """The value of an expression, which may be a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, code):
        """Until an expression holds."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self.call(
                "Runtime.evaluate", expression=f"!!({code})", returnByValue=True
            )
            if answer["result"].get("value") is True:
                return
            assert not self.complaints, self.complaints
            assert time.monotonic() < deadline, f"never true: {code}"
            time.sleep(0.02)

    def press(self, key, code="", text=""):
        """A key, down and up."""
        about = {"key": key, "code": code or key}
        number = {" ": 32, "Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}
        about["windowsVirtualKeyCode"] = number.get(key, ord(key[0].upper()))
        text = text or (key if len(key) == 1 else "\r" if key == "Enter" else "")
        more = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector):
        """The mouse on the middle of an element."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{find}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(
            f"(() => {{ const b = {find}.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **at)

    def picture(self):
        """What is in the window, as PNG, half as large."""
        size = self.run("({width: innerWidth, height: innerHeight})")
        part = {"x": 0, "y": 0, "scale": 0.5, **size}
        result = self.call("Page.captureScreenshot", format="png", clip=part)
        return base64.b64decode(result["data"])

    def close(self):
        """End the browser, and what it wrote."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.out)
        os.close(self.into)
        self.profile.cleanup()
