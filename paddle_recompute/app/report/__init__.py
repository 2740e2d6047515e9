"""The report of a run: one page that stands alone, made from the files in the run's folder."""

from __future__ import annotations

from paddle_recompute.app.report._charts import timeline_chart
from paddle_recompute.app.report._files import (
    EventLog,
    append_record,
    flat,
    line_of,
    read_metrics,
    read_records,
)
from paddle_recompute.app.report._pages import retrieval_table, write_page
from paddle_recompute.app.report._written import (
    follow_report,
    require_bokeh,
    write_report,
)

__all__ = [
    "EventLog",
    "append_record",
    "flat",
    "follow_report",
    "line_of",
    "read_metrics",
    "read_records",
    "require_bokeh",
    "retrieval_table",
    "timeline_chart",
    "write_page",
    "write_report",
]
