"""A call in a forked child, so that a crash costs that call alone."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any


def forked(call: Callable[[], dict[str, Any]], seconds: float = 60.0) -> dict[str, Any]:
    """What `call` returns in a child process; an ``error`` if it raises, dies or takes too long."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            try:
                result = call()
            except BaseException as error:
                if os.environ.get("SHOW_ERRORS"):
                    traceback.print_exc()
                words = next((line for line in str(error).splitlines() if line.strip()), "")
                result = {"error": f"{type(error).__name__}: {words[:90]}"}
            json.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    end = time.monotonic() + seconds
    os.set_blocking(reading, False)
    text = b""
    while time.monotonic() < end:
        try:
            piece = os.read(reading, 1 << 16)
        except BlockingIOError:
            time.sleep(0.02)
            continue
        if not piece:
            break
        text += piece
    else:
        os.kill(child, 9)
        text = b""
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if not text:
        return {"error": f"the process died (signal {os.WTERMSIG(status)})"}
    return dict(json.loads(text))
