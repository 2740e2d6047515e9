"""Do dygraph and the static graph train the same? The ranks that run train in both modes.

``runs`` trains, on each rank; ``comparison`` judges, in NumPy; ``report.txt.j2`` has the words.
"""

from paddle_recompute.app.parity.runs import train_and_compare

__all__ = ["train_and_compare"]
