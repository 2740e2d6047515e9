"""The command ``paddle-recompute doctor``, in each of its processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle

from paddle_recompute.config import Config
from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.doctor.configured import doctor_config
from paddle_recompute.doctor.self_test import self_test
from paddle_recompute.errors import OutputError


def examine(config: Config, *, say: Callable[[str], Any]) -> dict[str, Any]:
    """Examine what `config` would train; rank 0 prints the findings and warnings of all ranks.

    Returns:
        The report as JSON; rank 0 writes it to ``doctor.json`` in ``train.output_dir``.

    Raises:
        OutputError: It cannot be written.
    """
    report = doctor_config(config)
    own = report.to_dict()
    for section, add in (("findings", report.add), ("warnings", report.warn)):
        for rank, found in enumerate(values_of_ranks(own[section], f"the {section}")):
            for one in found:
                if one not in own[section]:
                    add(one["kind"], one["where"], f"(rank {rank}) {one['message']}")
    if os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        say(str(report))
        write_report(config.train.output_dir / "doctor.json", report.to_dict())
    return report.to_dict()


def write_self_test(output: Path, *, device: str | None, say: Callable[[str], Any]) -> bool:
    """Run the self-test on `device` (None: Paddle's choice) and write its result.

    Returns:
        Whether all cases are right.

    Raises:
        OutputError: It cannot be written.
    """
    if device is not None:
        paddle.set_device(device)
    result = self_test()
    cases = result["cases"]
    for case in cases:
        if not case["ok"]:
            say(f"{case['title']}: {case['fault']}")
    say(
        f"{sum(case['ok'] for case in cases)} of {len(cases)} cases are right on "
        f"{result['device']}, Paddle {result['paddle']}; attach {output} to a report"
    )
    write_report(output, result)
    return bool(result["ok"])


def write_report(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON.

    Raises:
        OutputError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
