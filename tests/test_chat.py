"""`nextn chat`: the conversation that the model sees, the commands, pipes and terminals."""

import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from functools import cache

import pytest
from chats import chatty, said

from nextn.checkpoint.checkpoint import SHIPPED
from nextn.cli.chat import _Conversation, _handle
from nextn.data.chat_template import apply_chat_template
from nextn.decoding.generate import generate
from nextn.errors import ConfigError
from nextn.model.model import Model
from nextn.settings import Settings

QUESTION = "def parse_args():"
CODE = "def parse_args():\n    parser = argparse."
PROMPT_MARK = "> "


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """The checkpoint in the package, with a chat template."""
    folder = tmp_path_factory.mktemp("speaking") / "model"
    shutil.copytree(SHIPPED, folder)
    chatty().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def load():
    """`Model.load` that keeps what it loaded, and so what the native backend recorded of it."""
    return cache(Model.load)


@pytest.fixture
def chat(here, load, monkeypatch):
    """chat(input, *arguments) -> exit code, stdout and stderr, with the input piped."""

    def call(text, *arguments):
        monkeypatch.setattr(Model, "load", load)
        content = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return here("chat", *arguments)

    return call


def answers(model, *prompts, **settings):
    """The texts that the library generates."""
    chosen = Settings(**settings)
    return [generate(model, [prompt], chosen)[0].text for prompt in prompts]


def without_marks(text):
    return text.replace("⟦", "").replace("⟧", "")


# In a pipe.


@pytest.mark.more
def test_piped_lines_are_messages(chat, load):
    """The second one continues the text of both; marks and figures are those of `nextn generate`."""
    code, out, err = chat(f"{QUESTION}\nx = 1\n", "tiny", "--max-tokens", 24)
    assert code == 0, err
    model = load(SHIPPED)
    first = answers(model, QUESTION, max_tokens=24)[0]
    newline = "" if first.endswith("\n") else "\n"
    second = answers(model, f"{QUESTION}{first}{newline}x = 1", max_tokens=24)[0]
    assert re.sub(r"\n[^\n]*tokens/s[^\n]*\n", "|", without_marks(out)) == f"{first}|{second}|"
    assert "⟦" in out
    assert out.count("ended at --max-tokens") == 2
    assert re.search(r"tokens/s  AL \d\.\d\d  a_1 \d\.\d\d", out)


@pytest.mark.more
def test_conversation_goes_through_the_chat_template(speaking, load):
    model = load(speaking)
    assert model.tokenizer.chat_template
    settings = Settings(num_speculative_tokens=2, max_tokens=12)
    conversation = _Conversation(model, settings, "torch", chat=True)
    for question in ("hi", "and?"):
        _handle(conversation, question)
    turns = said(("user", "hi"))
    first = answers(model, apply_chat_template(model.tokenizer, turns, add_generation_prompt=True)[0], max_tokens=12)
    turns += said(("assistant", first[0]), ("user", "and?"))
    second = answers(model, apply_chat_template(model.tokenizer, turns, add_generation_prompt=True)[0], max_tokens=12)
    assert conversation.messages == [*turns, {"role": "assistant", "content": second[0]}]
    assert conversation.num_answers == 2


def test_commands_in_a_pipe(chat):
    lines = ["/k", "/k 0", "a = 1", "/temperature 0.5", "/stats", "/k 2", "b = 2", "/clear", "/stats", "/help", "/quit"]
    code, out, _ = chat("\n".join([*lines, "never = 3"]), "tiny", "--max-tokens", 8)
    assert code == 0
    assert "K = 4" in out
    assert "K = 0 (plain decoding)" in out
    assert out.index("tokens/s  plain decoding") < out.index("temperature 0.5") < out.index("K = 2\n")
    assert "answers: 1  plain decoding" in out
    assert "answers: 2  AL" in out
    assert "95 % interval" in out
    assert "the conversation is forgotten" in out
    assert "/temperature T" in out
    assert out.count("tokens/s") == 2  # nothing is answered after /quit


def test_clear_forgets(chat):
    _, both, _ = chat(f"x = 1\n/clear\n{CODE}\n", "tiny", "--max-tokens", 12)
    _, alone, _ = chat(f"{CODE}\n", "tiny", "--max-tokens", 12)
    figures = re.compile(r"\n[^\n]*tokens/s[^\n]*\n")
    assert figures.split(both)[1].partition("forgotten\n")[2] == figures.split(alone)[0]


def test_each_sampled_answer_has_random_numbers_of_its_own(chat):
    lines = f"{QUESTION}\n/clear\n{QUESTION}\n"
    runs = [chat(lines, "tiny", "--max-tokens", 24, "--temperature", 1)[1] for _ in range(2)]
    texts = [re.sub(r"\d+ tokens/s", "", out) for out in runs]
    assert texts[0] == texts[1]
    first, second = (part.partition("\n")[2] for part in re.split("the conversation is forgotten", f"\n{texts[0]}"))
    assert first != second


@pytest.mark.more
def test_lines_that_end_with_a_backslash_go_on(chat, load):
    _, out, _ = chat("def f():\\\n    return \n", "tiny", "--max-tokens", 8)
    expected = answers(load(SHIPPED), "def f():\n    return ", max_tokens=8)[0]
    assert without_marks(out).startswith(f"{expected}\n")


@pytest.mark.parametrize(
    ("line", "said_what"),
    [
        ("/k x", "/k x; expected a whole number"),
        ("/k -1", "/k -1; expected a whole number"),
        ("/temperature hot", "/temperature hot; expected a number"),
        ("/temperature -1", "temperature=-1.0 must be 0 (greedy) or at least 1e-4"),
        ("/nonsense", "unknown command /nonsense; /help lists them"),
        ("x" * 5000, "the context holds 4096"),
    ],
)
def test_bad_input_ends_a_pipe_with_one_error(chat, line, said_what):
    code, _, err = chat(f"{line}\nnever = 3\n", "tiny")
    assert code == 2
    assert err.startswith("error: ")
    assert said_what in err
    assert err.count("\n") == 1


def test_input_that_is_not_utf_8_is_refused(chat):
    code, _, err = chat(b"\xff\xfe\n", "tiny")
    assert (code, "standard input is not UTF-8 (byte 0xff" in err) == (2, True)


def test_only_commands_begin_with_a_slash(chat):
    code, out, _ = chat(" /usr/bin\n/usr/bin is\n\n", "tiny", "--max-tokens", 4)
    assert (code, out.count("tokens/s")) == (0, 2)


def test_a_failed_message_is_forgotten(speaking, load):
    model = load(speaking)
    conversation = _Conversation(model, Settings(num_speculative_tokens=1, max_tokens=4), "torch", chat=True)
    with pytest.raises(ConfigError, match="the context holds"):
        _handle(conversation, "x" * 5000)
    assert conversation.messages == []
    _handle(conversation, "hi")
    assert [turn["role"] for turn in conversation.messages] == ["user", "assistant"]


def test_k_needs_a_head():
    model = Model.load(SHIPPED, skip_head=True)
    conversation = _Conversation(model, Settings(num_speculative_tokens=0), "torch", chat=False)
    with pytest.raises(ConfigError, match="has no head"):
        _handle(conversation, "/k 2")


@pytest.mark.more
def test_a_name_in_the_package_gives_way_to_a_folder(here, tmp_path, monkeypatch):
    assert here("generate", "tiny", "x", "--max-tokens", 2)[0] == 0
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _, err = here("generate", "tiny", "x", "--max-tokens", 2)
    assert (code, err.startswith("error: tiny: ")) == (2, True)


# In a terminal.


class Terminal:
    """`nextn chat` behind a pseudo-terminal."""

    def __init__(self, *arguments, **env):
        self._main, child = pty.openpty()
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nextn", "chat", *map(str, arguments)],
            stdin=child,
            stdout=child,
            stderr=child,
            env=environment | {"TERM": "xterm-256color"} | env,
            preexec_fn=lambda: _lead(child),
        )
        os.close(child)
        self.seen = ""

    def until(self, text, seconds=240.0):
        """Read until the text appears; return what came with it."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self._main], [], [], max(0.0, end - time.monotonic()))
            content = os.read(self._main, 65536) if ready else b""
            assert content, f"{text!r} did not come: {self.seen!r}"
            self.seen += content.decode()
        came, _, self.seen = self.seen.partition(text)
        return came + text

    def type(self, text):
        os.write(self._main, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._main)


def _lead(child):
    """Make the child the leader of a session with this terminal, so that Ctrl-C reaches it."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(child, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell without job control has its background commands ignore it


@pytest.fixture
def terminal():
    opened = []

    def make(*arguments, **env):
        opened.append(Terminal(*arguments, **env))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.mark.slow
def test_a_terminal_shows_colors_errors_and_goes_on(terminal):
    view = terminal("tiny", "--max-tokens", 12)
    assert "/help lists the commands, Ctrl-D ends  (no chat template" in view.until(PROMPT_MARK)
    view.type(f"{QUESTION}\n")
    answer = view.until("tokens/s")
    assert "\x1b[32m" in answer  # green
    assert "⟦" not in answer
    view.until(PROMPT_MARK)
    view.type("/nonsense\n")
    view.until("error: unknown command /nonsense")
    view.until(PROMPT_MARK)
    view.type("\x1b[A")  # the line before, offered again
    view.until("/nonsense")
    view.type("\x15/k 0\n")
    view.until("plain decoding")
    view.until(PROMPT_MARK)
    view.type("half a message")
    view.until("half a message")
    time.sleep(0.5)  # readline waits for the next key: it may miss a signal that comes just before
    for _ in range(20):  # Ctrl-C discards it; on a busy machine the signal may still be missed
        view.type("\x03")
        if select.select([view._main], [], [], 5.0)[0]:
            break
    view.until(PROMPT_MARK)
    view.type("/stats\n")
    view.until("answers: 1")
    view.until(PROMPT_MARK)
    view.type("\x04")
    assert view.process.wait(30) == 0


@pytest.mark.slow
def test_no_color_underlines(terminal):
    view = terminal("tiny", "--max-tokens", 12, NO_COLOR="1")
    view.until(PROMPT_MARK)
    view.type(f"{QUESTION}\n")
    answer = view.until("tokens/s")
    assert "\x1b[4m" in answer
    assert "\x1b[32m" not in answer


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_only(terminal, speaking):
    """What came stays in the conversation. The torch backend is slow enough to be stopped."""
    view = terminal(speaking, "--max-tokens", 4000, "--backend", "torch", "--temperature", 1)
    view.until(PROMPT_MARK)
    view.type("hi\n")
    view.until("\x1b[32m")  # an accepted draft
    view.type("\x03")
    assert "stopped" in view.until("stopped")
    view.until(PROMPT_MARK)
    view.type("/stats\n")
    view.until("answers: 1")
    view.until(PROMPT_MARK)
    view.type("/quit\n")
    assert view.process.wait(30) == 0


@pytest.mark.slow
def test_sigterm_ends_it(terminal):
    view = terminal("tiny")
    view.until(PROMPT_MARK)
    view.process.send_signal(signal.SIGTERM)
    assert view.process.wait(30) == -signal.SIGTERM
