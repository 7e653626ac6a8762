"""A key in foreign text, as it stands or escaped."""

import json
from html import escape
from urllib.parse import quote

import pytest

from nextn.bounded_http import Redactor

KEY = 'sk-a/b+c"\\d&<e>'


@pytest.mark.parametrize(
    "form",
    [
        str,
        json.dumps,
        quote,
        lambda key: quote(key, safe="").lower(),
        lambda key: "".join(f"\\u{ord(char):04x}" for char in key),
        lambda key: "".join(f"\\u{ord(char):04X}" for char in key),
        lambda key: "".join(f"&#{ord(char)};" for char in key),
        lambda key: key.replace("/", "\\/").replace("-", "%2d"),
        repr,
    ],
)
def test_forms(form):
    text = f"before {form(KEY)} after"
    found = Redactor(KEY).text(text)
    assert found.replace('"', "").replace("'", "") == "before *** after"


def test_html():
    assert Redactor("sk-a&b-cdef").text(escape("sk-a&b-cdef")) == "***"


def test_what_is_no_secret():
    """vLLM's users give "EMPTY" as a key, or "1"."""
    for key in (None, "", "1", "EMPTY"):
        assert Redactor(key).text("EMPTY 1 none") == "EMPTY 1 none"
        assert Redactor(key).data(b"EMPTY 1") == b"EMPTY 1"


def test_bytes_keep_their_length():
    assert Redactor("secret-key").data(b"a secret-key b") == b"a ********** b"


def test_shows_nothing_of_itself():
    assert "secret" not in repr(Redactor("secret-key"))
