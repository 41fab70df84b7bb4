"""The picture of a plan, pictures/plan.png, from the page that `blobmem footprint --html` writes.

`python docs/screenshot.py`, in the repository's root; it needs the extra `test`, and Chromium or Chrome.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blobmem.timeline import timelines, write_page

PICTURE = Path(__file__).parent / "pictures" / "plan.png"
MODEL = "models/resnet50/solver.prototxt"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser() -> str | None:
    """Where a browser is that runs without a screen; None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def opened(page: Path, **options: Any) -> Iterator[Any]:
    """A page in the browser, drawn; without a network. The options are those of playwright's `new_page`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # a sandbox cannot be had in a container, and what is opened here is our own
        process = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        tab = process.new_page(offline=True, **options)
        tab.goto(page.absolute().as_uri())
        tab.wait_for_function("Bokeh.documents.length && Bokeh.documents[0].is_idle")
        yield tab
        process.close()


def main() -> None:
    """Make the picture."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        write_page(timelines(MODEL), page, f"The plan of {MODEL}")
        with opened(page, viewport={"width": 1100, "height": 780}) as tab:
            tab.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
