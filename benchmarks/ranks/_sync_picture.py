"""One step's timeline, fused above overlap: what the processor and what the network did when."""

from __future__ import annotations

from pathlib import Path

from benchmarks.ranks._sync_step import StepTimes

COMPUTED = (
    ("forward", "#9ecae1", "began", "forward_ended"),
    ("backward, with the second forward", "#3182bd", "forward_ended", "backward_ended"),
    ("waiting for the network", "#eeeeee", "backward_ended", "synchronized"),
    ("update", "#31a354", "synchronized", "ended"),
)
SENT = "#e6550d"


def draw_timeline(steps: dict[str, StepTimes], title: str, path: Path) -> None:
    """Draw the steps of one rank, two lanes each, on one axis of seconds since the step began."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, all_axes = pyplot.subplots(
        len(steps), 1, figsize=(10, 1.1 + 1.45 * len(steps)), sharex=True, squeeze=False
    )
    for axes, (name, step) in zip(all_axes[:, 0], steps.items(), strict=True):
        for _, color, begin, end in COMPUTED:
            first, last = getattr(step, begin) - step.began, getattr(step, end) - step.began
            axes.barh(1, last - first, left=first, height=0.7, color=color)
        for _, _, started, ended in step.buckets:
            left = started - step.began
            axes.barh(0, ended - started, left=left, height=0.7, color=SENT, edgecolor="white")
        axes.set_yticks([0, 1], ["communication", "computation"])
        axes.set_ylim(-0.5, 1.5)
        axes.axvline(step.seconds, color="black", linewidth=1)
        axes.set_title(f"{name}: {step.seconds:.2f} s", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1, 0].set_xlabel("seconds since the step began, rank 0")
    all_axes[-1, 0].set_xlim(0, 1.02 * max(step.seconds for step in steps.values()))
    legend = [Patch(color=color, label=name) for name, color, _, _ in COMPUTED]
    legend.append(Patch(color=SENT, label="all-reduce of a bucket"))
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=legend, loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
