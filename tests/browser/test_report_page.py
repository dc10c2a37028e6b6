"""report.html in headless Chromium: hover, zoom, switches, samples, search, phone, dark, print."""

import io
import re
from typing import Any

import pytest
from PIL import Image

from rltrain.tracking.report import write_report
from tests.browser.conftest import ATTACK, write_run

K3 = "k3 over all response tokens"
ACCURACY = "Accuracy on held-out problems"


def figure(page: Any, title: str) -> Any:
    """The figure of this title, scrolled to and drawn."""
    box = page.locator("figure", has=page.get_by_role("heading", name=title, exact=True)).first
    box.scroll_into_view_if_needed()
    box.locator("canvas").first.wait_for()
    return box


def hover(page: Any, box: Any, x: float, y: float = 0.5) -> str:
    """Hover at these shares of the chart's width and height; the text of the tooltip."""
    place = box.locator(".chart").bounding_box()
    page.mouse.move(place["x"] + x * place["width"], place["y"] + y * place["height"])
    page.mouse.move(place["x"] + x * place["width"] + 1, place["y"] + y * place["height"])
    tip = box.locator(".tip")
    tip.wait_for(state="visible")
    return " ".join(tip.inner_text().split())


def ink(page: Any, box: Any) -> bytes:
    return box.locator(".chart").screenshot()


def colours(picture: bytes) -> set[tuple[int, ...]]:
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    return {colour for _, colour in image.getcolors(10**6)}


def test_every_chart_is_drawn_and_nothing_is_said_in_the_console(opened, report):
    page = opened(report)
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator("canvas").first.wait_for()
        assert len(colours(chart.screenshot())) > 3
    assert "The run was resumed after step 20." in page.locator(".notes").inner_text()


def test_nothing_moves_when_a_chart_comes_into_view(opened, report):
    page = opened(report)
    height = "document.documentElement.scrollHeight"
    before = page.evaluate(height)
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator("canvas").first.wait_for()
    assert page.evaluate(height) == before


def test_what_a_run_says_is_text(opened, report):
    page = opened(report)
    assert (
        page.locator("img[src=x]").count() == 0 and page.locator("b", has_text="bold").count() == 0
    )
    page.locator("#metric-search").fill("onerror")
    page.locator(".metric-name:visible").click()
    page.locator("tr.metric-chart canvas").first.wait_for()
    assert page.locator("#rollout-cards", has_text=ATTACK).count() == 1
    assert page.title() == "RUN with routing replay R3"


def test_hover_shows_every_series_at_the_step(opened, report):
    page = opened(report)
    text = hover(page, figure(page, K3), 0.55)
    assert text.startswith("step 3") and "as trained" in text and "native routing 4e-4" in text
    assert "(step 30)" in text  # the last time that it was measured
    text = hover(page, figure(page, ACCURACY), 0.95)
    assert text.startswith("step 60") and "all evaluation problems 80 %" in text
    assert "grpo_moe_r3, expected" in text


def test_a_heatmap_names_layer_step_and_value(opened, report):
    page = opened(report)
    text = hover(page, figure(page, "Experts that native routing also picks, by layer"), 0.5, 0.1)
    assert re.match("layer 0, step [23]", text) and text.endswith(": 1")


def test_the_legend_toggles_a_line(opened, report):
    page = opened(report)
    box = figure(page, K3)
    before = ink(page, box)
    button = box.get_by_role("button", name="native routing")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    page.mouse.move(0, 0)
    assert ink(page, box) != before
    assert "native" not in hover(page, box, 0.55)
    button.click()
    assert "native" in hover(page, box, 0.55)


def test_the_axis_switches_between_log_and_linear(opened, report):
    page = opened(report)
    box = figure(page, K3)
    switch = box.get_by_role("button", name=f"Logarithmic axis: {K3}")
    assert switch.get_attribute("aria-pressed") == "true"
    before = ink(page, box)
    switch.click()
    assert switch.get_attribute("aria-pressed") == "false"
    assert ink(page, box) != before


def drag(page: Any, box: Any, start: float, end: float) -> None:
    place = box.locator(".chart").bounding_box()
    y = place["y"] + 0.5 * place["height"]
    page.mouse.move(place["x"] + start * place["width"], y)
    page.mouse.down()
    page.mouse.move(place["x"] + end * place["width"], y, steps=4)
    page.mouse.up()


def test_zoom_by_dragging_is_shared_by_the_section_and_reset(opened, report):
    page = opened(report)
    other = figure(page, ACCURACY)
    whole = ink(page, other)
    box = figure(page, "Mean reward in training")
    reset = page.locator("#learning .reset-zoom")
    assert not reset.is_visible()
    drag(page, box, 0.3, 0.6)
    assert reset.is_visible() and not page.locator("#time .reset-zoom").is_visible()
    assert hover(page, box, 0.95).startswith("step 3")
    page.mouse.move(0, 0)
    assert ink(page, other) != whole
    reset.click()
    assert not reset.is_visible()
    assert ink(page, other) == whole
    drag(page, box, 0.3, 0.6)
    box.locator(".chart").dblclick()
    assert not reset.is_visible()


def test_the_wheel_zooms_with_ctrl_and_scrolls_without(opened, report):
    page = opened(report)
    box = figure(page, "Mean reward in training")
    hover(page, box, 0.5)
    page.mouse.wheel(0, 120)
    assert not page.locator("#learning .reset-zoom").is_visible()
    box = figure(page, "Mean reward in training")
    hover(page, box, 0.5)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -240)
    page.keyboard.up("Control")
    page.locator("#learning .reset-zoom").wait_for(state="visible")


def test_keys_move_from_step_to_step_and_zoom(opened, report):
    page = opened(report)
    box = figure(page, "Entropy of the policy")
    box.locator(".chart").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#announcement").inner_text() == "step 1: mean 0.99"
    page.keyboard.press("+")
    assert page.locator("#learning .reset-zoom").is_visible()
    page.keyboard.press("0")
    assert not page.locator("#learning .reset-zoom").is_visible()
    layers = figure(page, "Experts that native routing also picks, by layer")
    layers.locator(".chart").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.locator("#announcement").inner_text() == "layer 1, step 1: 0.99"


def test_rollouts_show_rewards_and_colour_tokens_by_choice(opened, report):
    page = opened(report)
    cards = page.locator("#rollout-cards article")
    assert cards.count() == 2
    assert "problem of step 60" in cards.first.inner_text()
    assert (
        "advantage -0.5" in cards.first.inner_text() and "format 0.25" in cards.first.inner_text()
    )
    token = cards.first.locator(".tokens span").nth(1)
    background = "element => getComputedStyle(element).backgroundColor"
    by_difference = token.evaluate(background)
    token.hover()
    page.locator("#token-tip").wait_for(state="visible")
    tip = " ".join(page.locator("#token-tip").inner_text().split())
    for fact in ("difference -0.75", "ratio 0.4724", "flipped no", "in the loss yes"):
        assert fact in tip
    page.get_by_role("button", name="flipped routes").click()
    token = page.locator("#rollout-cards article").first.locator(".tokens span")
    assert token.nth(1).evaluate(background) == "rgba(0, 0, 0, 0)" != by_difference
    assert token.nth(2).evaluate(background) != "rgba(0, 0, 0, 0)"
    page.locator("#rollout-step").select_option("1")
    assert "problem of step 1" in page.locator("#rollout-cards").inner_text()
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowRight")
    assert 'token "four "' in page.locator("#announcement").inner_text()


def test_metrics_are_searched_and_each_can_be_drawn(opened, report):
    page = opened(report)
    page.locator("#metric-search").fill("time/ gen")
    assert page.locator(".metric-name:visible").all_inner_texts() == ["time/generate"]
    assert page.locator("#metric-count").inner_text().startswith("1 of ")
    name = page.locator(".metric-name:visible")
    name.click()
    assert name.get_attribute("aria-expanded") == "true"
    page.locator("tr.metric-chart canvas").first.wait_for()
    name.click()
    assert page.locator("tr.metric-chart").count() == 0


def test_a_phone_needs_no_sideways_scrolling(opened, report):
    page = opened(report, width=390, height=844, has_touch=True, is_mobile=True)
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator("canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.locator("figure canvas").first.tap()
    page.locator("figure .tip").first.wait_for(state="visible")


def test_dark_is_dark_and_follows_a_change(opened, report):
    page = opened(report, color_scheme="dark")
    box = figure(page, K3)
    dark = colours(ink(page, box))
    assert (26, 28, 32) in dark and (116, 169, 255) in dark
    page.emulate_media(color_scheme="light")
    page.wait_for_timeout(100)
    light = colours(ink(page, box))
    assert (255, 255, 255) in light and (37, 99, 201) in light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_print_shows_every_chart_as_a_light_picture_that_fits(scheme, opened, report):
    page = opened(report, color_scheme=scheme, width=780)
    charts = page.locator(".chart").count()
    page.emulate_media(media="print")
    pictures = page.locator(".chart > .print-image")
    pictures.last.wait_for()
    assert pictures.count() == charts
    assert page.locator("canvas:visible").count() == 0
    for picture in pictures.all():
        box = picture.bounding_box()
        assert picture.evaluate("image => image.naturalWidth") >= 800
        assert box["x"] >= 0 and box["x"] + box["width"] <= 780
        shown = colours(picture.screenshot())
        assert (255, 255, 255) in shown and len(shown) > 3
    for section in ("learning", "mismatch", "time", "samples", "metrics"):
        assert page.locator(f"#{section} h2").is_visible()
    assert len(page.pdf()) > 50_000
    page.emulate_media(media="screen")
    page.locator(".print-image").first.wait_for(state="detached")


@pytest.mark.parametrize(
    "rows", ["", '{"step": 1, "reward/mean": null}\n', '{"step": 1, "a/b": 1}\n']
)
def test_empty_and_tiny_runs_open(rows, opened, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(rows)
    page = opened(write_report(tmp_path))
    assert page.locator("h1").is_visible()


def test_the_policy_of_the_page_runs_no_other_script(browser, tmp_path):
    """With the escaping broken, the browser refuses what was injected."""
    path = write_report(write_run(tmp_path / "run"))
    broken = path.read_text().replace(
        "</main>", f"</main><script>document.title='owned'</script>{ATTACK}"
    )
    path.write_text(broken)
    page = browser.new_page()
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    assert page.title() != "owned"
    assert any("Content Security Policy" in text for text in refused)
    page.close()
