"""The pages about runs: ``report.html`` of one run, and ``compare.html`` of several."""

from rltrain.tracking.report.page import write_report

__all__ = ["write_report"]
