"""The demo's figures and what it prints, from rounds made by hand; `make demo` itself takes minutes."""

import json

import pytest

from nextn.decoding.rounds import Round, SequenceRound
from nextn.demo import DecodedPair, DecodedSide, DemoReport, decode_pair
from nextn.train.evaluation import TeacherForcedFigures
from nextn.train.metrics import EvalRecord

TEXT = b"def add(a, b):\n    return a + b\n\n\nprint((add(1, 22), 'is', [x for x in range(9) if x % 4]), 7)\n"


def plain(text, seconds=0.1):
    """A round a byte behind the prefill's."""
    return tuple(Round((SequenceRound(0, (), 0, (byte,)),), 0.0, seconds) for byte in text)


def drafted(text, seconds=0.1):
    """Rounds of two drafts that keep one, and emit a byte of the trunk's own."""
    rest = [text[at : at + 2] for at in range(1, len(text), 2)]
    rounds = [Round((SequenceRound(0, (part[0], 0), 1, tuple(part)),), seconds / 2, seconds / 2) for part in rest]
    return (*plain(text[:1]), *rounds)


def report(folder, *, other=b""):
    """other: what MTP says in place of the greedy text."""
    loop = b"\n" * 99
    greedy = DecodedPair(
        DecodedSide((plain(TEXT), plain(loop))), DecodedSide((drafted(other or TEXT), drafted(loop, 1e-6)))
    )
    sampled = DecodedPair(DecodedSide((plain(TEXT), plain(TEXT))), DecodedSide((drafted(TEXT), drafted(TEXT))))
    evaluation = EvalRecord(9, TeacherForcedFigures((1.0, 2.0), (0.5,), (0.5,)))
    return DemoReport(folder, (tuple(b"# a prompt\n"),) * 2, greedy, sampled, evaluation, 30.0, 35.0, 2)


def test_loops_do_not_count(tmp_path):
    """Catches a speed-up of loops, which are easy to draft; where all loop, all count."""
    pair = report(tmp_path).greedy
    assert pair.non_degenerate == [0]
    assert pair.figures().speedup == pytest.approx(2)
    assert pair.speedup > 2.5
    assert pair.figures().mtp.acceptance.rates == (1.0, 0.0)
    only = DecodedPair(pair.plain.select([1]), pair.mtp.select([1]))
    assert (only.non_degenerate, only.figures().speedup) == ([], only.speedup)


def test_seconds_are_without_the_prefill():
    side = DecodedSide((plain(TEXT[:5], seconds=2.0),))
    assert (side.seconds, side.tokens_per_s) == (8.0, 0.5)


def test_identical_is_of_all_greedy_texts(tmp_path):
    assert report(tmp_path).identical
    assert not report(tmp_path, other=TEXT[:-4] + b"!" + TEXT[-3:]).identical
    assert report(tmp_path).as_record()["identical_output"]


def test_pairs_are_decoded_prompt_by_prompt(monkeypatch):
    """Plain first, then MTP, of one prompt after the other: a machine that slows down hits both sides."""
    from nextn.decoding.rounds import Settings

    asked = []
    monkeypatch.setattr(
        "nextn.demo.decode_side",
        lambda model, texts, settings: asked.append((texts, settings.drafts)) or DecodedSide((plain(bytes(texts[0])),)),
    )
    pair = decode_pair(None, [b"ab", b"cde"], Settings(drafts=3))
    assert asked == [([b"ab"], 0), ([b"ab"], 3), ([b"cde"], 0), ([b"cde"], 3)]
    assert pair.plain.tokens == pair.mtp.tokens == (tuple(b"ab"), tuple(b"cde"))


@pytest.fixture
def told(tmp_path, monkeypatch, here):
    """`nextn demo` whose training and decoding are over -> what it prints."""

    def call(*args, **changes):
        monkeypatch.setattr("nextn.demo.run_demo", lambda *args, **options: report(tmp_path, **changes))
        monkeypatch.setattr("nextn.demo.plot_report", lambda made: [made.folder / "loss.png"])
        code, out, err = here("demo", "--folder", tmp_path, *args)
        assert code == 0, err
        return out

    return call


def test_the_story(told, tmp_path):
    lines = told().splitlines()
    assert "held-out prompt 1, continued, greedy (in brackets: accepted drafts)" in lines[0]
    assert "\u27e6e\u27e7" in lines[2]
    story = [line.replace("\u27e6", "").replace("\u27e7", "") for line in lines[1:4]]
    assert story == ["# a prompt", "def add(a, b):", "    return a + b"]
    said = "\n".join(lines)
    assert "greedy         AL 2.00 at K = 2  a_1 1.00  a_2 0.00  (1 of 2 texts repetitive, left out)" in said
    assert "plain 10 tokens/s, MTP 20 tokens/s = 2.00 x  output identical" in said
    assert said.count("output") == 1
    assert f"trained 30 s, 35 s in all; in {tmp_path}" in said.replace("\n", "")
    assert "model, report.json, loss.png" in said
    assert "output DIFFERENT" in told(other=TEXT[:-1] + b"!")


def test_json(told):
    record = json.loads(told("--json"))
    assert (record["drafts"], record["greedy"]["looping"], record["temperature_1"]["speedup"]) == (
        2, 1, pytest.approx(2),
    )  # fmt: skip


def test_stopped(tmp_path, monkeypatch, here):
    """A stopped demo says how to go on, and prints no figures."""
    monkeypatch.setattr("nextn.demo.run_demo", lambda *args, **options: None)
    code, out, err = here("demo", "--folder", tmp_path)
    assert code == 130
    assert "nextn demo" in out + err
    assert "what the head did" not in out
