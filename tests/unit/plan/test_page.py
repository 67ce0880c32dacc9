"""The page that draws a plan: what it holds, and what a real browser makes of it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.unit.plan.test_case import Json, read, side, tensor

from reshard.plan.case import Case
from reshard.plan.page import as_page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here to draw the page")


def mesh(extents: list[int], first: int, *placements: str) -> Json:
    count = 1
    for extent in extents:
        count *= extent
    ranks = list(range(first, first + count))
    return {"mesh": extents, "ranks": ranks, "placements": list(placements)}


ROWS_TO_COLUMNS = read(tensor(destination=mesh([4], 2, "S1")))

MANY = read(
    tensor(name="flat", shape=[7, 9], source=mesh([4], 0, "F"), destination=mesh([4], 4, "S1")),
    tensor(name="replicas", source=mesh([2, 2], 0, "R", "S0"), destination=mesh([4], 4, "R")),
    tensor(name="scalar", shape=[], source=mesh([4], 0, "R"), destination=mesh([4], 4, "R")),
    tensor(name="empty", shape=[0, 4], source=mesh([4], 0, "S0"), destination=mesh([4], 4, "R")),
    tensor(
        name="nested",
        shape=[4, 6, 8],
        source=mesh([4], 0, "S1"),
        destination=mesh([2, 2], 4, "S0", "S2"),
    ),
)

LARGE = read(
    tensor(
        name="down",
        shape=[8192, 28672],
        source=mesh([64], 0, "S0"),
        destination=mesh([8, 8], 64, "R", "S1"),
    )
)


def page(case: Case) -> str:
    return as_page(case, case.plan())


def test_the_page_stands_alone() -> None:
    text = page(MANY)
    assert not re.search(r"""(src|href)\s*=|@import|url\((?!#)(?!\$)|fetch\(""", text)
    assert not re.search(r"/\*(style|script|drawing)\*/", text)
    without_namespace = text.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in without_namespace


def test_a_name_cannot_leave_its_place() -> None:
    name = "</script><script>alert(1)</script>/*script*/<!--"
    text = page(read(tensor(name=name)))
    assert "alert(1)</script>" not in text
    island = re.search(r'<script type="application/json" id="drawing">(.*?)</script>', text)
    assert island is not None
    assert json.loads(island[1])["tensors"][0]["names"] == [name]


def test_layers_that_lie_alike_are_drawn_once() -> None:
    layers = [tensor(name=f"layers.{i}.w", destination=mesh([4], 2, "S1")) for i in range(300)]
    assert len(page(read(*layers))) < 60_000


class _Elements(HTMLParser):
    """Counts elements by class, and keeps the text of those with an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.classes: list[tuple[str, str]] = []
        self.texts: dict[str, str] = {}
        self.body: dict[str, str | None] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.classes += [(tag, name) for name in (given.get("class") or "").split()]
        self._open = given.get("id") or self._open
        if tag == "body":
            self.body = given

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data

    def count(self, tag: str, name: str) -> int:
        return self.classes.count((tag, name))


def drawn(text: str, folder: Path, fragment: str = "") -> _Elements:
    """The document as Chromium leaves it after the script ran."""
    path = folder / "plan.html"
    path.write_text(text, encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        f"{path.as_uri()}{fragment}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    document = _Elements(done.stdout)
    assert document.body.get("data-drawn") == "yes", "the script did not run to its end"
    return document


@browser
def test_two_ranks_to_four(tmp_path: Path) -> None:
    document = drawn(page(ROWS_TO_COLUMNS), tmp_path)
    assert document.count("rect", "tile") == 2 + 4
    assert document.count("path", "flow") == 8
    assert document.count("line", "bound") == 2
    assert document.count("button", "chip") == 6
    assert "redundancy: every element received once" in document.texts["facts"]
    assert (
        document.texts["summary"].strip() == "1 tensor from ranks 0-1 to ranks 2-5: 256 B to move"
    )


@browser
def test_all_kinds_of_tensors(tmp_path: Path) -> None:
    document = drawn(page(MANY), tmp_path)
    assert document.count("article", "tensor") == 5
    # A source tile of `nested` shows once in each half of dim 0, which the destination cuts.
    flat, replicas, scalar, nested = 10 + 3, 2 + 1, 1 + 1, 2 * 3 + 4
    assert document.count("rect", "tile") == flat + replicas + scalar + nested


@browser
def test_sixty_four_ranks_with_one_chosen(tmp_path: Path) -> None:
    document = drawn(page(LARGE), tmp_path, "#rank=3")
    assert document.count("rect", "tile") == 64 + 8
    assert document.count("rect", "cell") == 64 * 64
    # The chosen rank's 64 flows, bar and tile stay; what belongs to others steps back.
    assert document.count("rect", "faded") == (64 * 64 - 64) + (64 + 64 - 1) + (64 + 8 - 1)


HOVER = """<script>
const tile = document.querySelectorAll(".tile")[SEEN];
for (const kind of ["mouseenter", "mousemove"]) tile.dispatchEvent(new MouseEvent(kind));
</script></body>"""


@browser
def test_hovering_shows_the_region_and_where_it_comes_from(tmp_path: Path) -> None:
    text = page(ROWS_TO_COLUMNS).replace("</body>", HOVER.replace("SEEN", "3"))
    document = drawn(text, tmp_path)
    assert document.texts["tip"].splitlines() == [
        "[0:8, 2:4]  64 B",
        "needed by rank 3",
        "from rank 0: [0:4, 2:4]",
        "from rank 1: [4:8, 2:4]",
    ]
    assert document.count("rect", "linked") == 2 * 2


@browser
def test_the_browser_test_can_fail(tmp_path: Path) -> None:
    broken = page(ROWS_TO_COLUMNS).replace("function header() {", "function header() { throw 1;")
    with pytest.raises(AssertionError, match="the script did not run to its end"):
        drawn(broken, tmp_path)


def test_replicas_of_both_sides_share_their_tiles() -> None:
    text = page(read(tensor(source=side(placements=["R"]))))
    island = re.search(r'id="drawing">(.*?)</script>', text)
    assert island is not None
    assert json.loads(island[1])["tensors"][0]["held"] == [[[0, 1], [0, 0], [8, 8]]]
