"""`nextn docs` shows every page of docs."""

from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_lists_all_pages(here):
    code, out, _ = here("docs")
    names = [line.split()[0] for line in out.splitlines()]
    assert code == 0
    assert sorted(names) == sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
    assert names[:2] == ["index", "tutorials/first-hour"]


def test_shows_a_page_by_name_or_last_part(here):
    text = (DOCS / "how-to" / "low-acceptance.md").read_text().rstrip()
    for topic in ("how-to/low-acceptance", "low-acceptance", "docs/how-to/low-acceptance.md"):
        code, out, _ = here("docs", topic)
        assert code == 0
        assert out.rstrip() == text


def test_a_whole_name_comes_before_last_parts(here):
    """There are several pages called index, of which one has no folder."""
    code, out, _ = here("docs", "index")
    assert (code, out.rstrip()) == (0, (DOCS / "index.md").read_text().rstrip())


def test_an_unknown_page_is_refused_with_those_that_are_meant(here):
    for topic, words in (("low-aceptance", "low-acceptance"), ("zzz", "`nextn docs` lists all pages")):
        code, _, complaint = here("docs", topic)
        assert code == 2
        assert words in complaint
