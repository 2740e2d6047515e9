"""Models of PaddleNLP and PaddleFormers: plain, recomputed by us, by fleet, and by `patch_fleet`.

Small random models, with their dropout, two AdamW steps of 8 x 64 tokens each. "ours" is
`apply_recompute` with `checkpoints: auto`. "fleet" is the recompute that the model has itself,
switched on in its configuration, with fleet's function in its default form. "patched" is the same
under `patch_fleet`: no code of the model is changed. Peaks are those of the second step. Bit-equal
compares the losses, all gradients, buffers and updated weights with the plain run's.
Qwen, DeepSeek and GLM of PaddleFormers name ``paddlefleet``, which is not on the registry, for
their pipelines; the benchmark has a stand-in, so that they can be imported.

    python -m benchmarks.correctness.third_party [--library paddlenlp] [--only Ernie]

Each run is a process of its own, forked after the library was imported.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import sys
import types
from typing import Any

from benchmarks.harness.forked import forked

VARIANTS = ("plain", "ours", "fleet", "patched")
MIB = 2**20


def import_library(name: str) -> Any:
    """The library, with what it wants to find imported before Paddle."""
    if name == "paddlenlp":
        importlib.import_module("datasets")
    else:
        _stand_in_for_paddlefleet()
    return importlib.import_module(name)


def _stand_in_for_paddlefleet() -> None:
    """Let modules of models be imported that name ``paddlefleet``, which is not on the registry.

    They derive classes for its pipelines from ``GPTModelProvider``, and ask whether it has kernels.
    The models themselves are plain Layers.
    """
    for name, contents in {
        "paddleformers.transformers.gpt_provider": {
            "GPTModelProvider": type("GPTModelProvider", (), {"transform_rules": {}})
        },
        "paddlefleet_ops": {"is_deep_ep_available": lambda: False},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module


def run(case: Any, variant: str) -> dict[str, Any]:
    """Two steps of one case; what is compared, and the peak."""
    import paddle

    from benchmarks.correctness._third_party_models import loss_of, switch_own_recompute
    from paddle_recompute import RecomputeConfig, apply_recompute, is_recomputing, patch_fleet
    from paddle_recompute._paddle import memory as _memory

    if variant == "patched":
        patch_fleet()
    model = case.build()
    batch = case.batch()
    report = apply_recompute(model, RecomputeConfig()) if variant == "ours" else None
    if variant in ("fleet", "patched"):
        switch_own_recompute(model)
    second = [0]
    for layer in model.sublayers():
        layer.register_forward_pre_hook(
            lambda *_: second.__setitem__(0, second[0] + is_recomputing())
        )
    trained = [p for p in model.parameters() if not p.stop_gradient]
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=trained)
    digests: dict[str, str] = {}
    paddle.seed(2)
    for step in range(2):
        if _memory.can_reset_peak():
            _memory.reset_peak()
        loss = loss_of(model(**batch))
        loss.backward()
        digests[f"loss {step}"] = repr(float(loss))
        del loss
        peak = _memory.peak_bytes()
        for name, parameter in model.named_parameters():
            digests[f"gradient {step} {name}"] = _digest(parameter.grad)
        optimizer.step()
        optimizer.clear_grad()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digests[f"value {name}"] = _digest(tensor)
    if report is not None:
        report.verify()
    return {
        "digests": digests,
        "peak": peak,
        "second": second[0],
        "chosen": list(report.chosen) if report is not None else [],
    }


def _digest(tensor: Any) -> str:
    if tensor is None or not tensor._is_initialized():
        return "none"
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def compare(case: Any) -> dict[str, Any]:
    """All variants of one case."""
    found = {variant: forked(lambda v=variant: run(case, v)) for variant in VARIANTS}
    plain = found["plain"]
    summary: dict[str, Any] = {"model": case.name, "library": case.library}
    for variant in VARIANTS:
        one = found[variant]
        if "error" in one:
            summary[variant] = {"error": one["error"]}
            continue
        entry: dict[str, Any] = {"mib": one["peak"] / MIB, "second_forwards": one["second"]}
        if variant != "plain" and "error" not in plain:
            keys = plain["digests"].keys() | one["digests"].keys()
            differing = [k for k in keys if plain["digests"].get(k) != one["digests"].get(k)]
            entry["compared"], entry["differing"] = len(keys), sorted(differing)
        if variant == "ours":
            entry["chosen"] = one["chosen"]
        summary[variant] = entry
    return summary


def cell(entry: dict[str, Any], plain: dict[str, Any]) -> str:
    """MiB, and whether it is bit-equal to the plain run."""
    if "error" in entry:
        return entry["error"].split(":")[0].replace("|", "/")
    text = f"{entry['mib']:.1f}"
    if entry is plain or "differing" not in entry:
        return text
    equal = "yes" if not entry["differing"] else f"no ({len(entry['differing'])})"
    return f"{text}, {equal}"


def main() -> None:
    """Compare the cases of the libraries that are installed here, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=("paddlenlp", "paddleformers"))
    parser.add_argument("--only", help="one model, by its name in the table")
    options = parser.parse_args()
    name = options.library or next(
        (n for n in ("paddlenlp", "paddleformers") if importlib.util.find_spec(n)), None
    )
    if name is None or importlib.util.find_spec(name) is None:
        sys.exit(
            f"{name or 'PaddleNLP or PaddleFormers'} is not installed: make venv-nlp venv-formers"
        )
    library = import_library(name)
    from benchmarks.correctness._third_party_models import CASES
    from benchmarks.harness.record import table, write_record

    cases = [case for case in CASES[name] if options.only in (None, case.name)]
    found = []
    for case in cases:
        found.append(compare(case))
        print(json.dumps(found[-1])[:2000], file=sys.stderr, flush=True)
    rows = [
        (
            one["model"],
            *(cell(one[variant], one["plain"]) for variant in VARIANTS),
            "yes" if one["patched"].get("second_forwards") else "no",
            "; ".join(one["ours"].get("chosen", ["-"])),
        )
        for one in found
    ]
    header = (
        "model", "plain MiB", "ours MiB, bit-equal", "fleet MiB, bit-equal",
        "patched MiB, bit-equal", "model calls recompute", "auto chose",
    )  # fmt: skip
    body = [
        *(__doc__ or "").strip().splitlines()[2:9],
        "",
        f"{name} {library.__version__}. `no (n)`: n of the compared values differ; a word is the "
        "error that ended the run.",
        "",
        *table(header, rows),
        "",
        *(f"- {one['model']}: {one['plain']['error']}" for one in found if "error" in one["plain"]),
    ]
    if options.only:
        print("\n".join(body))
        return
    write_record(
        f"third_party_{name}",
        f"Models of {name}",
        f"make bench-third_party (python -m benchmarks.correctness.third_party --library {name})",
        body,
    )


if __name__ == "__main__":
    main()
