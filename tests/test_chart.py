"""The picture of a bench: well-formed, self-contained, and drawn to scale."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from runtime.bench.chart import WIDTH, RateSeries, TimeBar, axis_ticks, bench_chart

SVG = "{http://www.w3.org/2000/svg}"
FAST = RateSeries("/mnt/a (tier A)", ((0, 1, 10e9), (1, 2, 5e9)))
SLOW = RateSeries("/mnt/b (tier B)", ((0, 1, 2e9), (1, 2, 2e9)))
BARS = [TimeBar("A 1", (("waiting for drives", 0.3), ("GPU", 0.1))), TimeBar("B 1", (("waiting for drives", 0.1), ("GPU", 0.1), ("rest", 0.05)))]


def drawn(title: str = "bench", rates: list[RateSeries] | None = None, bars: list[TimeBar] | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(bench_chart(title, rates=[FAST, SLOW] if rates is None else rates, bars=BARS if bars is None else bars))


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def curves(picture: ElementTree.Element) -> list[list[tuple[float, float]]]:
    lines = [element.attrib["points"].split() for element in picture.iter(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def test_any_name_leaves_the_picture_well_formed() -> None:
    name = 'a <b> & "c" ]]> \u00e9'
    picture = drawn(name, [FAST._replace(name=name)], [TimeBar(name, ((name, 0.1),))])
    assert texts(picture).count(name) == 4
    assert picture.find(f"{SVG}title").text == name


def test_nothing_is_fetched_from_elsewhere() -> None:
    text = bench_chart("bench", rates=[FAST], bars=BARS)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"href|url\(|@import|<script|<image|<foreignObject", text)


def test_both_grounds_are_drawn_by_the_picture_itself() -> None:
    picture = drawn()
    style = picture.find(f"{SVG}style").text
    plain, dark = style.split("@media (prefers-color-scheme:dark)")
    for part in (plain, dark):
        assert all(f".{name}" in part for name in ("ground", "line0", "line5", "area0", "area5", "grid")) and "text{fill:" in part
    assert next(picture.iter(f"{SVG}rect")).attrib["class"] == "ground"
    assert style.count("{") == style.count("}")


def test_a_rate_is_as_high_as_its_axis_says() -> None:
    picture = drawn()
    by_length = [curve for curve in curves(picture) if len(curve) == 4]
    assert len(by_length) == 2
    ticks = {e.text: float(e.attrib["y"]) - 4 for e in picture.iter(f"{SVG}text") if (e.text or "").endswith("B/s")}
    zero, ten = ticks["0B/s"], ticks["10GB/s"]
    for curve, series in zip(by_length, (FAST, SLOW), strict=True):
        found = [(zero - y) / (zero - ten) * 10e9 for _, y in curve]
        assert found == pytest.approx([rate for _, _, rate in series.intervals for _ in range(2)], rel=0.01)


def test_segments_are_as_wide_as_their_time_and_follow_one_another() -> None:
    picture = drawn()
    segments = [r for r in picture.iter(f"{SVG}rect") if ":" in (r.findtext(f"{SVG}title") or "")]
    places = [(float(r.attrib["x"]), float(r.attrib["width"])) for r in segments]
    labels = [r.findtext(f"{SVG}title") for r in segments]
    assert labels == ["waiting for drives: 300 ms", "GPU: 100 ms", "waiting for drives: 100 ms", "GPU: 100 ms", "rest: 50 ms"]
    assert [w for _, w in places] == pytest.approx([w * places[0][1] / 300 for w in (300, 100, 100, 100, 50)], abs=0.2)
    assert places[1][0] == pytest.approx(sum(places[0]), abs=0.2) and places[2][0] == places[0][0]
    # One kind, one colour, whatever its place.
    assert segments[1].attrib["class"] == segments[3].attrib["class"] != segments[0].attrib["class"]


def test_everything_lies_inside_the_picture() -> None:
    picture = drawn(rates=[FAST, SLOW] * 4, bars=BARS * 4)
    height = float(picture.attrib["height"])
    for element in picture.iter():
        if "x" in element.attrib:
            assert 0 <= float(element.attrib["x"]) <= WIDTH and 0 <= float(element.attrib["y"]) <= height
            assert float(element.attrib["x"]) + float(element.attrib.get("width", 0)) <= WIDTH
    assert all(0 <= x <= WIDTH and 0 <= y <= height for curve in curves(picture) for x, y in curve)


def test_no_text_lies_over_another() -> None:
    picture = drawn(rates=[FAST, SLOW] * 4, bars=BARS * 4)
    names = sorted({float(e.attrib["y"]) for e in picture.iter(f"{SVG}text") if e.attrib["text-anchor"] == "start"})
    assert len(names) == 1 + 1 + 8 + 1 + 3 and min(b - a for a, b in pairwise(names)) >= 14


def test_what_was_not_measured_is_said() -> None:
    assert "these runs hold no samples of what the drives read" in texts(drawn(rates=[]))
    assert "these runs hold no samples of what the drives read" in texts(drawn(rates=[FAST._replace(intervals=())]))
    assert "no decode step was timed" in texts(drawn(bars=[TimeBar("A 1", ())]))
    assert drawn(rates=[], bars=[]).tag == f"{SVG}svg"


@pytest.mark.parametrize("largest", [1e-6, 0.3, 1, 2.0, 7, 9.99, 10, 14e9, 123456])
@pytest.mark.parametrize("most", [5, 8, 10])
def test_marks_begin_at_zero_cover_the_largest_value_and_are_not_too_many(largest: float, most: int) -> None:
    ticks = axis_ticks(largest, most=most)
    step = ticks[1]
    assert ticks[0] == 0 and ticks[-2] < largest <= ticks[-1] * (1 + 1e-9) and len(ticks) <= most + 1
    assert f"{step:.0e}"[0] in "125" and float(f"{step:.0e}") == pytest.approx(step)


def test_a_drive_that_read_nothing_is_drawn_on_the_ground_line() -> None:
    picture = drawn(rates=[RateSeries("idle", ((0, 1, 0.0),))])
    (curve,) = [c for c in curves(picture) if c[1][0] > 200]
    assert len({y for _, y in curve}) == 1 and axis_ticks(0, most=5) == [0, 1]
