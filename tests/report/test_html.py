"""The web page is well-formed, self-contained and escaped, and has the numbers of the value."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import estimates
from tonnage import api
from tonnage.estimates.estimate import Estimate
from tonnage.report import markup
from tonnage.report.html import fragment, page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b"
VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Collects tags and attributes, and checks that each tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.data: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.data.append(data)
        elif self.open and self.open[-1] != "style":
            self.text += data


@pytest.mark.parametrize("make", [estimates.fitting, estimates.full_card, estimates.scripted])
def test_page_is_well_formed_and_makes_no_requests(make):
    read = Reader(page(make()))
    assert not {"link", "img", "iframe", "object", "video"} & set(read.tags)
    assert not [value for name, value in read.attributes if name in ("src", "href") or name.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in read.attributes
    assert "url(" not in page(make())
    assert read.tags.count("svg") == 2


@pytest.mark.parametrize("make", [estimates.fitting, estimates.full_card])
def test_page_contains_the_estimate_as_data(make):
    read = Reader(page(make()))
    assert ("type", "application/json") in read.attributes
    assert Estimate.from_json(json.loads(read.data[0])) == make()


def test_everything_is_escaped():
    evil = replace(
        estimates.full_card(),
        model={"name": EVIL, "parameters": 5},
        versions={EVIL: EVIL},
        notes=(EVIL,),
        plan={"optimizer": EVIL, EVIL: EVIL},
        cluster={**estimates.full_card().cluster, "gpu": EVIL},
        peak=replace(estimates.full_card().peak, layer=EVIL, phase=EVIL, by_category={EVIL: 5}),
        oom=replace(estimates.full_card().oom, message=EVIL, stack=(EVIL,), phase=EVIL, layer=EVIL),
    )
    read = Reader(page(evil))
    assert read.tags.count("script") == 1
    assert "img" not in read.tags
    assert json.loads(read.data[0])["model"]["name"] == EVIL
    assert "\x1b" not in page(evil)
    assert "script" not in Reader(fragment(evil)).tags


def test_fragment_has_the_numbers():
    text = Reader(fragment(estimates.fitting())).text
    for part in ("FITS", "60.00 GiB of 80.00 GiB (75.0 %)", "28.00 GiB", "llama-7b (6.74 B parameters)", "58.00 GiB"):
        assert part in text


def test_notebooks_show_the_fragment():
    assert api.Estimate.notebook_view is fragment
    assert estimates.fitting()._repr_html_() == fragment(estimates.fitting())


def test_bar_pieces_add_up_to_the_part_of_the_card():
    # 60 of 80 GiB, in a bar 760 wide.
    widths = [
        float(value)
        for (name, value), (_, height) in zip(
            Reader(fragment(estimates.fitting())).attributes,
            Reader(fragment(estimates.fitting())).attributes[1:],
            strict=False,
        )
        if name == "width" and height == "34"
    ]
    assert sum(widths) == pytest.approx(570, abs=0.1)


def test_without_a_curve_or_capacity():
    bare = replace(estimates.fitting(), curve=(), cluster={}, phases=())
    assert Reader(page(bare)).tags.count("svg") == 1


def test_nothing_is_wider_than_a_phone():
    """Tables scroll in their own box; whatever else could be wide breaks its lines or scales."""
    rules = {name.strip(): body for name, body in re.findall(r"(\.tonnage[^{}]*)\{([^{}]*)\}", markup.STYLE)}
    assert "overflow-x: auto" in " ".join(body for name, body in rules.items() if name.endswith("table"))
    assert "overflow-wrap: anywhere" in rules[".tonnage"]
    assert "width: 100%" in rules[".tonnage svg"]
    assert "pre-wrap" in rules[".tonnage pre"]
    widths = re.findall(r"(?<!max-)(?<!-)\b(?:min-)?width: (\d+)px", markup.STYLE + page(estimates.full_card()))
    assert [width for width in widths if int(width) > 350] == []


def test_text_has_the_colour_of_the_page_around_it():
    """So it is readable in a dark notebook as in a light one."""
    rules = re.findall(r"(\.tonnage[^{}]*)\{([^{}]*)\}", markup.STYLE)
    coloured = {name.strip() for name, body in rules if re.search(r"(?<![\w-])color:", body)}
    assert coloured == {".tonnage .fits", ".tonnage .tight", ".tonnage .full"}
    assert not any(re.search(r"background(-color)?: #", body) for _, body in rules)
