"""Standard input, output and error of the command line: the only module that reads or prints.

Names, messages and texts come from untrusted checkpoints, engines and models. `visible` is the one function that they
pass through on the way to a terminal; `echo`, `plain` and every console call it.
"""

import io
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TextIO, TypeVar
from unicodedata import category

from nextn.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nextn.engines.check_result import CheckReport, CheckResult

T = TypeVar("T")
MAX_ROWS = 50  # of one table: untrusted files can name any number of things
_MAX_LENGTH = 1000  # characters of one name or message
_WIDTH = 120  # of a table, in characters, without a terminal
_HARMLESS = "\n\t\u200c\u200d"  # in running text: line breaks, tabs, and the joiners of Persian, Hindi and emoji
_READER_LEFT = 141  # 128 + SIGPIPE, as shells report `yes | head -1`


def visible(text: str, *, lines: bool = False) -> str:
    r"""Escape every character that could control a terminal, such as `\x1b` or `\u202e`.

    Running text keeps its line breaks and wide spaces with `lines`. In a name they are escaped, too, so that it cannot
    fake a line of output.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char, lines=lines) else char.encode("unicode_escape").decode() for char in text)


def _is_harmless(char: str, *, lines: bool) -> bool:
    return char.isprintable() or (lines and (char in _HARMLESS or category(char) in ("Zs", "Co", "Cn")))


def shown(text: str) -> str:
    """Escape a name or one-line message, and cut it where it would fill the screen."""
    return visible(text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}...")


def echo(text: str, *, err: bool = False) -> None:
    """Print running text and a line break, to standard error if `err`."""
    print(visible(text, lines=True), file=sys.stderr if err else sys.stdout, flush=True)


def print_lines(*lines: str) -> None:
    """Print lines to standard output, each escaped as a name is, and none wrapped."""
    for line in lines:
        echo(visible(line))


def print_error(error: Exception) -> None:
    """Print `error: ...` to standard error; further lines are indented, so that none looks like output of our own."""
    echo(re.sub(r"\n(?! )", "\n  ", f"error: {error}"), err=True)


def print_note(note: str) -> None:
    """Print a note of one line to standard error."""
    echo(f"note: {visible(note)}", err=True)


def print_notes(notes: Iterable[str]) -> None:
    """Print each as `print_note` does."""
    for note in notes:
        print_note(note)


def print_json(record: object) -> None:
    """Print one JSON document in ASCII. `json` escapes all but DEL."""
    print(json.dumps(record).replace("\x7f", r"\u007f"), flush=True)


def print_result(record: object, message: str, *, as_json: bool) -> None:
    """Print the result of a command as JSON, or the message."""
    if as_json:
        print_json(record)
    else:
        echo(message)


def plain(text: str, style: str | None = None, *, lines: bool = False) -> "Text":
    """Return escaped text for a rich console or table, never parsed as markup. lines: see `visible`."""
    from rich.text import Text

    return Text(visible(text, lines=lines), style=style or "")


def console(*, stderr: bool = False) -> "Console":
    """Return a rich console that escapes every segment, whatever its origin, except rich's own control segments.

    In a pipe or a file, where nothing sets a width, no line is wrapped, and a table is as wide as it needs to be,
    without blanks at the ends of its lines.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

    class VisibleConsole(Console):
        def print(self, *objects: object, **options: Any) -> None:
            if _has_width(self):
                super().print(*objects, **options)
                return
            before, tables = self.size, [each for each in objects if isinstance(each, Table)]
            self.size = (max(before.width, _WIDTH, *(_widest(self, each) for each in tables)), before.height)
            with self.capture() if tables else nullcontext() as captured:
                super().print(*objects, **{"soft_wrap": not tables} | options)
            self.size = before
            if captured is not None:  # the last cell of a row is padded to the width of its column
                print(re.sub(r" +\n", "\n", captured.get()), end="", file=self.file, flush=True)

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text, lines=True), segment.style)

        def on_broken_pipe(self) -> None:
            _end(self.file, BrokenPipeError())

    return VisibleConsole(stderr=stderr)


def _has_width(screen: "Console") -> bool:
    return screen.is_terminal or "COLUMNS" in os.environ


def _widest(screen: "Console", renderable: "Table | Text") -> int:
    """The columns that it takes without a line break."""
    from rich.measure import Measurement

    return Measurement.get(screen, screen.options.update(width=100_000), renderable).maximum


@dataclass(frozen=True)
class Marks:
    """How the text of rounds with accepted drafts is marked: by a style, or by brackets if the output has no styles."""

    style: str
    brackets: tuple[str, str]
    words: str

    @classmethod
    def of(cls, screen: "Console") -> "Marks":
        """Green; underlined where NO_COLOR is set; brackets in a pipe, a file or a terminal without styles."""
        if screen.color_system is None:
            return cls("", ("\u27e6", "\u27e7"), "in brackets")
        return cls("underline", ("", ""), "underlined") if screen.no_color else cls("green", ("", ""), "green")

    def text(self, text: str, *, accepted: bool) -> "Text":
        """Running text of one round, marked if it holds accepted drafts."""
        first, last = self.brackets if accepted and text else ("", "")
        return plain(f"{first}{text}{last}", style=self.style if accepted else None, lines=True)


def figures_table(*titles: str, left: Collection[str] = ("",), no_wrap: bool = True) -> "Table":
    """Return a table with bold titles, whose columns are aligned to the right except those named in `left`."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(plain(title), justify="left" if title in left else "right", no_wrap=no_wrap)
    return table


def print_table(table: "Table") -> None:
    """Print a table of figures; if it is too wide, print each row as `title value` pairs, wrapped between pairs."""
    screen = console()
    if not _has_width(screen) or _widest(screen, table) <= screen.width:
        screen.print(table)
        return
    titles = [str(column.header) for column in table.columns]
    for row, cells in zip(table.rows, zip_longest(*(column.cells for column in table.columns)), strict=True):
        pairs = [(title, str(getattr(cell, "plain", cell))) for title, cell in zip(titles, cells, strict=True)]
        for line in _wrapped([f"{title} {cell}".strip() for title, cell in pairs if cell], screen.width):
            screen.print(plain(line, style=str(row.style or "")), soft_wrap=True)
        if row.end_section:
            screen.print()


def _wrapped(words: Iterable[str], width: int) -> Iterator[str]:
    """Join words to lines with two spaces between them; all lines but the first are indented."""
    line = ""
    for word in words:
        if line and len(line) + 2 + len(word) > width:
            yield line
            line = ""
            word = f"  {word}"
        line += f"  {word}" if line.strip() else word
    yield line


def read_stdin() -> str:
    """Read standard input to its end. Raises ConfigError if it is closed or not UTF-8."""
    return _decoded(_stdin().read())


def _stdin() -> BinaryIO:
    if sys.stdin is None:
        raise ConfigError("standard input is closed; pass the prompt as an argument, or pipe text in")
    return sys.stdin.buffer


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input is not UTF-8 (byte {error.object[error.start]:#04x} at offset {error.start}); convert it, "
            "for example with iconv -t UTF-8"
        ) from error


def is_interactive() -> bool:
    """Return whether a person types: standard input and output are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def read_lines(prompt: str) -> Iterator[str]:
    """Yield messages from standard input: lines without line break, joined where one ends with a backslash.

    In a terminal, each line is asked for with the prompt and can be edited; earlier ones are offered by the arrow keys
    and not stored. Ctrl-C discards the message. Raises ConfigError as `read_stdin` does.
    """
    if not is_interactive():
        yield from _joined(_decoded(line).rstrip("\r\n") for line in _stdin())
        return
    import readline  # noqa: F401  # `input` uses it once it is imported

    while True:
        try:
            yield next(_joined(_typed(prompt)))
        except StopIteration:
            return
        except KeyboardInterrupt:
            print()


def _typed(prompt: str) -> Iterator[str]:
    while True:
        try:
            yield input(prompt)
        except EOFError:
            print()
            return
        prompt = "." * len(prompt.rstrip()) + " "


def _joined(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{next(lines, '')}"
        yield line


class _Output(io.TextIOWrapper):
    """A standard stream that survives a closed pipe and a full disk, and escapes what its encoding lacks."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=stream.line_buffering
        )

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            _end(self, error)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            _end(self, error)


def _end(stream: TextIO | object, error: OSError) -> NoReturn:
    """Exit with 141, or 2 if it is no closed pipe. Buffered output is discarded, or the exit would fail on it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())  # type: ignore[union-attr]  # rich's `file` is any text stream
    if isinstance(error, BrokenPipeError):
        raise SystemExit(_READER_LEFT)
    echo(f"error: the output cannot be written: {error.strerror}", err=True)
    raise SystemExit(2)


def guard_streams() -> None:
    """Exit with code 141 when a pipe is closed, wherever the process prints; for our own processes only."""
    if isinstance(sys.__stdout__, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout = _Output(sys.__stdout__)
    if isinstance(sys.__stderr__, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = _Output(sys.__stderr__)


def flush_streams() -> None:
    """Write buffered output while a closed pipe can still be reported."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def shortened(items: Sequence[T], most: int = MAX_ROWS) -> tuple[Sequence[T], str]:
    """Return the first items for a table, and a line about the others ("" if there are none)."""
    more = len(items) - most
    return items[:most], f"and {more:,} more; --json lists them all" if more > 0 else ""


_STYLES = {"passed": "bold green", "failed": "bold red", "inconclusive": "yellow"}
_HEADLINES = {"passed": "no findings", "failed": "findings", "inconclusive": "inconclusive"}


def show_report(report: "CheckReport") -> None:
    """Print a row for each check and a line for the report."""
    show_checks(report.checks)
    show_headline(report)


def show_checks(checks: "Sequence[CheckResult]", *, names: Iterable[str] = ()) -> None:
    """Print a row for each check. names: of all checks, where each is printed as soon as it is known."""
    from rich.table import Table

    if not checks:
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    has_titles = any(check.title for check in checks)
    for known in (_STYLES, names) if names else ((), ()):
        table.add_column(no_wrap=True, min_width=max(map(len, known), default=None))
    if has_titles:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        evidence = plain(shown(check.evidence))
        width = max((len(label) for label, _ in check.details), default=0)
        for label, line in check.details:
            evidence.append(f"\n{label:<{width}}  {shown(line)}", style="cyan" if label == "to do" else "default")
        title = [plain(check.title)] if has_titles else []
        table.add_row(plain(check.outcome, style=_STYLES[check.outcome]), plain(check.name), *title, evidence)
    console().print(table)


def show_headline(report: "CheckReport") -> None:
    """Print the line for the report."""
    headline = plain(_HEADLINES[report.outcome], style=_STYLES[report.outcome])
    console().print(headline.append(f"  {shown(report.summary)}", style="default"), soft_wrap=True)
