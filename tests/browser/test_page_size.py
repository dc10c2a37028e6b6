"""The report of 5,000 steps of a model with 60 layers stays below 5 MB and opens."""

from benchmarks.report_size import write_run
from rltrain.tracking.report import write_report


def test_a_long_run_of_a_deep_model_stays_small(opened, tmp_path):
    write_run(tmp_path, steps=5000, layers=60)
    path = write_report(tmp_path)
    assert path.stat().st_size < 5_000_000
    page = opened(path)
    page.locator(".chart canvas").first.wait_for()
    assert "rollouts are on this page" in page.locator("#samples").inner_text()
