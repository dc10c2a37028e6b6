"""The commands that show a run."""

import pytest

from rltrain.cli.report_command import dashboard, report


def test_report_writes_the_page_and_says_where(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert report(tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert "Mean reward" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("project", ["", "project", "a/b/c", "/b"])
def test_dashboard_wants_entity_and_project(project):
    with pytest.raises(ValueError, match="expected ENTITY/PROJECT"):
        dashboard(project)
