"""The page stands alone, and a browser shows what the rows say."""

import importlib.util
import itertools
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("bokeh")

from blobmem.timeline import timelines, write_page
from blobmem.timeline.page import LABELS

ROOT = Path(__file__).parents[2]

spec = importlib.util.spec_from_file_location("screenshot", ROOT / "docs" / "screenshot.py")
screenshot = importlib.util.module_from_spec(spec)
spec.loader.exec_module(screenshot)


class Loads(HTMLParser):
    """What a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href", "data", "srcset")]


@pytest.fixture(scope="module")
def resnet():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return timelines("models/resnet50/solver.prototxt")


@pytest.fixture
def page(chain, tmp_path):
    path = tmp_path / "plan.html"
    write_page(chain, path, "a <plan>")
    return path


def test_a_large_net_in_a_page_that_loads_nothing(resnet, tmp_path):
    path = tmp_path / "plan.html"
    write_page(resnet, path, "ResNet-50")
    text = path.read_text()
    parser = Loads()
    parser.feed(text)
    assert not parser.found and "@import" not in text
    assert len(text) < 6e6
    assert all(f'"{row.name}"' in text for nets in resnet.values() for timeline in nets for row in timeline.rows)


def test_nothing_takes_turns(tmp_path):
    """As where a net's only array is its output."""
    net = 'layer { name: "d" type: "Input" top: "d" input_param { shape { dim: 2 } } } layer { name: "r" type: "ReLU" bottom: "d" top: "r" }'
    path = tmp_path / "plan.html"
    write_page(timelines(net), path, "empty")
    assert "train net, batch 2: 0.0 MiB" in path.read_text()


FIGURES = """() => [...Bokeh.documents[0]._all_models.values()]
    .filter(model => model.type == "Figure").map(model => Bokeh.index.find_one(model))
    .filter(view => view != null && view.el.checkVisibility())
    .sort((one, other) => one.el.getBoundingClientRect().x - other.el.getBoundingClientRect().x)"""


def place(tab, index, x, mib):
    """Where in the window a call and an address of a net are."""
    return tab.evaluate(
        f"""([index, x, y]) => {{
            const view = ({FIGURES})()[index], box = view.canvas_view.el.getBoundingClientRect()
            return [box.x + view.frame.x_scale.compute(x), box.y + view.frame.y_scale.compute(y)]
        }}""",
        [index, x, mib],
    )


def hovered(tab, index, row, call):
    tab.mouse.move(*place(tab, index, call + 0.5, (row.offset + row.nbytes / 2) / 2**20))
    tab.locator(".bk-tooltip-row-value").first.wait_for()
    texts = tab.locator(".bk-tooltip-row-value").all_inner_texts()
    tab.mouse.move(1, 1)
    tab.locator(".bk-tooltip-row-value").first.wait_for(state="hidden")
    return texts


@pytest.mark.skipif(screenshot.browser() is None, reason="needs Chromium or Chrome")
def test_copies_are_below_the_calls_that_they_are_beside(evicting, tmp_path):
    pytest.importorskip("playwright")
    write_page({"planned": [evicting]}, tmp_path / "plan.html", "evicting")
    with screenshot.opened(tmp_path / "plan.html", viewport={"width": 1400, "height": 900}) as tab:
        arrays, copies = tab.evaluate(
            f"() => ({FIGURES})().map(view => view.frame.bbox).map(box => [box.x, box.width])"
        )
        assert arrays == copies
        copy = max(evicting.copies, key=lambda copy: copy.end - copy.begin)
        x, _ = place(tab, 0, (copy.begin + copy.end) / 2, 0)
        box = tab.get_by_text("copies away").or_(tab.locator("canvas")).last.bounding_box()
        tab.mouse.move(x, box["y"] + box["height"] * (0.25 if copy.out else 0.75))
        tab.locator(".bk-tooltip-row-value").first.wait_for()
        texts = tab.locator(".bk-tooltip-row-value").all_inner_texts()
    assert texts[0] == copy.name and texts[1].startswith(f"{copy.nbytes:,} (")
    assert texts[2:] == [f"{copy.ms:.3f} ms", evicting.label(copy.begin), evicting.label(copy.end)]


@pytest.mark.skipif(screenshot.browser() is None, reason="needs Chromium or Chrome")
def test_in_a_browser(chain, page):
    pytest.importorskip("playwright")
    with screenshot.opened(page, viewport={"width": 1400, "height": 900}) as tab:
        tab.set_default_timeout(5000)
        errors = []
        tab.on("pageerror", lambda error: errors.append(error))
        assert tab.get_by_role("heading", name="a <plan>", exact=True).count() == 1
        for scheme, timelines in chain.items():
            tab.get_by_text(LABELS[scheme], exact=True).click()
            titles = f"() => ({FIGURES})().map(view => view.model.title.text)"
            tab.wait_for_function(f"unplanned => ({titles})().every(text => text.includes('in use') == unplanned)",
                                  arg=scheme == "unplanned")  # fmt: skip
            assert [text.partition(":")[0] for text in tab.evaluate(titles)] == [timeline.net for timeline in timelines]
            listed = tab.locator("td:first-child:visible").all_inner_texts()
            assert listed == [row.name for timeline in timelines for row in timeline.live(timeline.peak())]
            for index, timeline in enumerate(timelines):
                peak = timeline.peak()
                assert tab.get_by_text(f"call {peak} {timeline.calls[peak]}").locator("visible=true").count() > 0
                for row, call in itertools.product(timeline.rows, ("first", "last")):
                    assert hovered(tab, index, row, getattr(row, call)) == [
                        row.name,
                        row.purpose,
                        f"{row.shape[0]} x {row.shape[1]}",
                        f"{row.nbytes:,} (0.0 MiB)",
                        row.layer,
                        f"{row.first} {timeline.calls[row.first]}",
                        f"{row.last} {timeline.calls[row.last]}",
                    ]
        assert not errors


def test_without_bokeh(chain, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    with pytest.raises(ImportError, match=r"pip install 'blobmem\[plot\]'"):
        write_page(chain, tmp_path / "plan.html", "plan")
    assert not list(tmp_path.iterdir())
