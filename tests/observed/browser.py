"""Chromium without a window, driven by chromedriver's own protocol: what a page shows, says and asks for.

Both are packages of the system (Debian: chromium, chromium-driver); without them `open_browser` skips the test.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage"),
)


def reason_for_none() -> str | None:
    """Return why there is no browser here."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(missing)} cannot be found: apt-get install chromium chromium-driver" if missing else None


class Browser:
    """One window."""

    def __init__(self, driver: str, profile: Path) -> None:
        self._driver = driver
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": logs}}
        self._session = f"/session/{self._ask('POST', '/session', {'capabilities': wanted})['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.load(answer)["value"]

    def close(self) -> None:
        self._ask("DELETE", self._session)

    def command(self, name: str, **parameters: Any) -> Any:
        """Give a command of the DevTools protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def show(self, url: str, *, width: int = 1280, dark: bool = False) -> None:
        """Open a page in a window of this width and theme; forget what earlier ones said."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.console(), self.requests()
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Return what a script returns: `return document.title`."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def until(self, script: str) -> Any:
        """Wait until a script returns something true, and return that."""
        return wait_for(lambda: self.run(script), what=script)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def move(self, x: float, y: float) -> None:
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def console(self) -> list[str]:
        """Return what the console has said since it was last asked, also what the browser refused."""
        return [f"{line['level']}: {line['message']}" for line in self._log("browser")]

    def requests(self) -> list[str]:
        """Return what was asked for since it was last asked."""
        messages = [json.loads(line["message"])["message"] for line in self._log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def _log(self, kind: str) -> list[Any]:
        return self._ask("POST", f"{self._session}/se/log", {"type": kind})  # type: ignore[no-any-return]

    def picture(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        shot = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with a new profile in a folder; skips the test where there is none."""
    reason = reason_for_none()
    if reason is not None:
        pytest.skip(reason)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}", "--silent"], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _answers(port), what="chromedriver")
        browser = Browser(f"http://127.0.0.1:{port}", folder / "profile")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(DEADLINE_S)


def wait_for(look: Callable[[], Any], *, what: str) -> Any:
    until = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < until, f"waited for {what}"
    return found


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
