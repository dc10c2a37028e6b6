"""Cuts charts out of a run's report, side by side in one picture: the pictures of page 3.

python docs/tutorial/pictures.py RUN OUT.png "Mean reward in training" "Gradient norm"
"""

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"
GAP, MARGIN = 12, 12
BACKGROUND = (246, 246, 242)


def cut_charts(run: Path, titles: list[str]) -> list[Image.Image]:
    """A picture of each chart with one of the titles, in their order."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        page.goto((run / "report.html").absolute().as_uri())
        pictures = []
        for title in titles:
            heading = page.get_by_text(title, exact=True).first
            figure = heading.locator("xpath=ancestor-or-self::figure")
            figure.scroll_into_view_if_needed()
            page.wait_for_timeout(700)  # a chart is drawn when it comes into view
            pictures.append(Image.open(io.BytesIO(figure.screenshot())))
        browser.close()
    return pictures


def side_by_side(pictures: list[Image.Image], columns: int = 2) -> Image.Image:
    width, height = (max(size) for size in zip(*(p.size for p in pictures), strict=True))
    rows = -(-len(pictures) // columns)
    size = (columns * (width + GAP) - GAP + 2 * MARGIN, rows * (height + GAP) - GAP + 2 * MARGIN)
    sheet = Image.new("RGB", size, BACKGROUND)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        place = (MARGIN + column * (width + GAP), MARGIN + row * (height + GAP))
        sheet.paste(picture, place)
    return sheet


if __name__ == "__main__":
    run_folder, out, *chart_titles = sys.argv[1:]
    sheet = side_by_side(cut_charts(Path(run_folder), chart_titles))
    sheet.quantize(128).save(out, optimize=True)
