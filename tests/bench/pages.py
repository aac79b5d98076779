"""Reads a report as a browser would, and finds what it should not have."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements close in order, that nothing outside is referred to, and that names are used once."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.ids: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href", "src") or "url(" in (value or ""):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def check_page(text: str) -> Page:
    page = Page(text)
    assert "http:" not in text
    assert "https:" not in text
    assert len(page.ids) == len(set(page.ids))
    for reference in page.references:
        name = reference.removeprefix("url(").removesuffix(")")
        assert name.startswith("#"), reference
        assert name[1:] in page.ids, reference
    return page
