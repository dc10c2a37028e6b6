"""compare.html in headless Chromium."""

from rltrain.tracking.report.compare_page import write_comparison
from tests.browser.conftest import ATTACK, write_run


def test_runs_are_drawn_together_and_a_metric_can_be_drawn(opened, tmp_path):
    folders = [
        write_run(tmp_path / "baseline"),
        write_run(tmp_path / "other", seed=1, **{ATTACK: ATTACK}),
    ]
    path, _ = write_comparison(folders, tmp_path / "compare.html")
    page = opened(path)
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator("canvas").first.wait_for()
    figure = page.locator("figure", has_text="Accuracy on held-out problems").first
    figure.scroll_into_view_if_needed()
    place = figure.locator(".chart").bounding_box()
    page.mouse.move(place["x"] + 0.9 * place["width"], place["y"] + 60)
    page.mouse.move(place["x"] + 0.97 * place["width"], place["y"] + 60)
    figure.locator(".tip").wait_for(state="visible")
    text = figure.locator(".tip").inner_text()
    assert "step 60" in text and "baseline" in text and "other" in text
    page.locator("#metric-search").fill("policy/entropy")
    page.locator(".metric-name:visible").click()
    assert page.locator("tr.metric-chart .legend button").count() == 2
    assert page.locator("#differences").get_by_text(ATTACK).count() >= 1
    assert page.locator("img[src=x]").count() == 0


def test_the_comparison_fits_a_phone(opened, tmp_path):
    folders = [write_run(tmp_path / name, seed=i) for i, name in enumerate(("a", "b", "c"))]
    path, _ = write_comparison(folders, tmp_path / "compare.html")
    page = opened(path, width=390, height=844, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
