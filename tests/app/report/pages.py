"""What a reader, or a browser, finds in a page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from html.parser import HTMLParser
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
_VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """The visible text of a page, its links, and whether each tag that opens is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts = 0
        self._open: list[str] = []
        self._words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self._open, self._open
        self.text = re.sub(r"\s+", " ", " ".join(self._words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.scripts += tag == "script"
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self._words.append(data)


def browser() -> str | None:
    """A Chromium: ``PADDLE_RECOMPUTE_TEST_BROWSER``, or one on the PATH; None: there is none."""
    named = os.environ.get("PADDLE_RECOMPUTE_TEST_BROWSER")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


_WATCH = """<script>
const faults = [];
addEventListener("error", (event) => faults.push(event.message));
console.error = console.warn = (...words) => faults.push(words.join(" "));
const wait = setInterval(() => {
  if (typeof Bokeh === "undefined" || !Bokeh.documents[0]?.is_idle) return;
  clearInterval(wait);
  const charts = Bokeh.documents.flatMap((one) => one.roots()).length;
  const width = document.documentElement.scrollWidth;
  console.log(`SEEN charts=${charts} width=${width} faults=[${faults.join("; ")}]`);
}, 50);
</script>"""


def seen_by_browser(path: Path, *, width: int) -> tuple[int, int, str]:
    """(charts that are drawn, width that the page takes, faults on the console) in a browser.

    The page is in a frame: a window of Chromium is not narrower than 500 pixels.
    """
    found = browser()
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        watched = Path(folder) / "page.html"
        text = path.read_text(encoding="utf-8")
        watched.write_text(text.replace("<head>", f"<head>{_WATCH}", 1), encoding="utf-8")
        frame = Path(folder) / "frame.html"
        frame.write_text(f'<iframe src="page.html" width="{width}" height="844"></iframe>')
        process = subprocess.Popen(
            [
                *(found, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
                *("--window-size=1400,900", f"--user-data-dir={folder}/profile"),
                frame.as_uri(),
            ],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if match := re.search(r"SEEN charts=(\d+) width=(\d+) faults=\[(.*)\]", line):
                    return int(match[1]), int(match[2]), match[3]
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    raise AssertionError(f"{found} showed no charts within 60 s")
