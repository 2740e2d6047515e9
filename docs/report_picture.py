"""Draw docs/report.png: `python docs/report_picture.py RUN` photographs the report of a run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from paddle_recompute.app.report import write_report

PICTURE = Path(__file__).resolve().parent / "report.png"
WIDTH, HEIGHT = 1180, 1475


def draw(run: Path) -> None:
    """Write the page of `run` to a temporary file, and what a browser shows of it to `PICTURE`."""
    with tempfile.TemporaryDirectory() as folder:
        page = write_report([run], Path(folder) / "report.html")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--virtual-time-budget=9000", f"--user-data-dir={folder}/profile"]
        command += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={folder}/whole.png"]
        subprocess.run([*command, page.as_uri()], check=True, capture_output=True)
        with Image.open(f"{folder}/whole.png") as whole:
            whole.convert("RGB").quantize(64).save(PICTURE, optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
