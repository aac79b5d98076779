"""Tables of the command line: they fit the terminal, or 80 columns in a pipe, and show every figure and name whole.

rich's own tables cut cells ("17.6 T…") when the columns do not fit into the width. The tables of this module save space
in other ways: first they leave out the frame, and wrap headers and texts between words. If a row still does not fit on
one line, they print each cell on a line of its own. They never break figures, and they never break names, because
the user may pass a name to another command. A name wider than the terminal is printed on a line of its own, which
exceeds the width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich import box as boxes
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

__all__ = ["Table", "show"]

_COLUMN_CHARACTERS_MIN = 16
"""Minimum width of a text column; words that are longer may be broken."""
_WIDTH_CHARACTERS_MAX = 1 << 16


def show(content: RenderableType) -> None:
    """Print a report to stdout."""
    # Cropping would cut a name that is wider than the terminal.
    # An address such as [fd00::a:b] has no emoji in it.
    Console(emoji=False).print(content, crop=False)


class Table(RichTable):
    """Table of texts, names and figures. It shows every cell whole, even in a narrow terminal.

    Parameters
    ----------
    title, caption : str
        Text above and below the table, with rich's markup.
    expand : bool
        True to fill the width of the terminal.
    """

    def __init__(self, title: str = "", *, caption: str = "", expand: bool = False) -> None:
        super().__init__(
            title=title or None,
            title_justify="left",
            caption=caption or None,
            caption_justify="left",
            expand=expand,
        )

    def add_texts(self, *headers: str) -> None:
        """Add columns of texts, which wrap between words."""
        for header in headers:
            self.add_column(header, overflow="fold")

    def add_names(self, *headers: str) -> None:
        """Add columns of names, which are never broken."""
        for header in headers:
            self.add_column(header, no_wrap=True)

    def add_figures(self, *headers: str) -> None:
        """Add columns of figures, which are never broken and are aligned to the right."""
        for header in headers:
            self.add_column(header, justify="right", no_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the widest form that fits the width: with a frame, without a frame, or one cell on each line."""
        width = options.max_width
        if _full_width(self, console, options) <= width:
            yield from super().__rich_console__(console, options)
            return
        for gap in (2, 1):
            fitted = self._fitted(console, options, gap)
            if fitted is not None:
                # Not this class's own method again: the copy fits already.
                yield from RichTable.__rich_console__(fitted, console, options)
                return
        yield from self._records(console, width)

    def _fitted(self, console: Console, options: ConsoleOptions, gap: int) -> Table | None:
        """Return a copy without a frame that fits the width, with `gap` spaces between columns.

        Return None if the columns do not fit.
        """
        least, full = zip(*(_widths(console, column) for column in self.columns), strict=True)
        fitted = copy.copy(self)
        fitted.box, fitted.show_edge, fitted.pad_edge = boxes.SIMPLE_HEAD, False, False
        fitted.padding = (0, gap - 1, 0, 0)  # the box has a space between columns
        fitted.expand = False
        fitted.columns = [replace(column, width=width) for column, width in zip(self.columns, full, strict=True)]
        frame = _full_width(fitted, console, options) - sum(full)
        widths = _shared(options.max_width - frame, least, full)
        if widths is None:
            return None
        fitted.columns = [
            replace(column, width=width, header=_wrapped(console, column.header, width))
            for column, width in zip(self.columns, widths, strict=True)
        ]
        return fitted

    def _records(self, console: Console, width: int) -> Iterator[RenderableType | Segment]:
        """Render each cell on a line of its own, after the header of its column if there is one."""
        if self.title:
            yield _rendered(console, self.title)
        headers = [_rendered(console, column.header) for column in self.columns]
        indent = max(header.cell_len for header in headers) + 2
        for row in zip(*(tuple(column.cells) for column in self.columns), strict=True):
            yield Text("─" * min(width, 20))
            for column, header, cell in zip(self.columns, headers, row, strict=True):
                value = _rendered(console, cell)
                if not value.plain:
                    continue
                room = width - indent if header.plain else width
                start = Text.assemble(header, " " * (indent - header.cell_len)) if header.plain else Text()
                if room < (value.cell_len if column.no_wrap else min(value.cell_len, _COLUMN_CHARACTERS_MIN)):
                    yield header
                    room = width - 2
                    start = Text() if column.no_wrap and value.cell_len > room else Text("  ")
                lines = [value] if column.no_wrap else value.wrap(console, room)
                for line in lines:
                    # Segments are not wrapped again.
                    yield from Text.assemble(start, line).render(console, end="\n")
                    start = Text(" " * start.cell_len)
        if self.caption:
            yield _rendered(console, self.caption)


def _full_width(table: RichTable, console: Console, options: ConsoleOptions) -> int:
    """Return the width that a table needs if no cell wraps. The title does not count, because it may wrap."""
    compact = copy.copy(table)
    compact.expand = False
    return Measurement.get(console, options.update(width=_WIDTH_CHARACTERS_MAX), compact).maximum


def _rendered(console: Console, content: RenderableType) -> Text:
    return content if isinstance(content, Text) else console.render_str(str(content), highlight=False)


def _words(text: Text) -> int:
    """Return the width of the longest word."""
    return max((len(word) for word in text.plain.split()), default=0)


def _lines(text: Text) -> int:
    """Return the width of the longest line."""
    return max((line.cell_len for line in text.split("\n")), default=0)


def _widths(console: Console, column: Column) -> tuple[int, int]:
    """Return the minimum width of a column, and the width at which none of its texts wraps."""
    header = _rendered(console, column.header)
    cells = [_rendered(console, cell) for cell in column.cells]
    full = max(_lines(text) for text in (header, *cells))
    if column.no_wrap:
        return max(_words(header), *(_lines(cell) for cell in cells), 1), full
    return max(1, min(max(_words(text) for text in (header, *cells)), _COLUMN_CHARACTERS_MIN), _words(header)), full


def _shared(room: int, least: Sequence[int], full: Sequence[int]) -> list[int] | None:
    """Divide the width among columns; return None if `room` is less than the sum of the minimum widths.

    Each column receives its minimum width. Each further character goes to the column that lacks the most characters.
    """
    widths = list(least)
    left = room - sum(widths)
    if left < 0:
        return None
    for _ in range(left):
        at = max(range(len(widths)), key=lambda column: full[column] - widths[column])
        if widths[at] >= full[at]:
            break
        widths[at] += 1
    return widths


def _wrapped(console: Console, header: RenderableType, width: int) -> Text:
    """Break a header between words so that it fits its column. Columns whose cells never wrap need this, too."""
    return Text("\n").join(_rendered(console, header).wrap(console, width))
