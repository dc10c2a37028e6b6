"""``rltrain compare`` prints a table and names its page."""

import json

from rltrain.cli.app import main


def test_compare_prints_the_runs_their_differences_and_the_page(tmp_path, capsys):
    for name, lr in (("first", 1.0), ("second", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"step": s, "reward/mean": 0.5 + 0.01 * (s % 3)} for s in range(40)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yaml").write_text(f"optimizer:\n  lr: {lr}\n")
    page = tmp_path / "out.html"
    folders = [str(tmp_path / name) for name in ("first", "second")]
    assert main(["compare", *folders, "--output", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "no difference shown" in shown and "differ in: optimizer.lr" in shown
    assert "One seed each" in shown and shown.rstrip().endswith(str(page))
    assert page.exists()


def test_compare_refuses_what_is_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", str(tmp_path), str(tmp_path / "x")]) == 2
    assert f"{tmp_path}: expected the folder of a run" in capsys.readouterr().err
    assert main(["compare"]) == 2
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
    assert main(["compare", "a", "b", "--output", "none/x.html"]) == 2
    assert "--output none/x.html: expected a file in a folder" in capsys.readouterr().err
