"""`nextn chat` holds a conversation with a model in the terminal."""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nextn.cli.common import expanded, stop_flag, use_chat
from nextn.cli.decode import DecodingOptions, acceptance_line, speed
from nextn.cli.model_options import ModelOptions
from nextn.cli.screen import (
    Marks,
    console,
    figures_table,
    is_interactive,
    plain,
    print_error,
    print_notes,
    print_table,
    read_lines,
)
from nextn.errors import ConfigError
from nextn.settings import Settings
from nextn.text_format import rate_text

if TYPE_CHECKING:
    from nextn.decoding.records import Round
    from nextn.model.model import Model

_HELP = """\
/k N            draft N tokens per round; 0 = plain decoding
/temperature T  sample with temperature T; 0 = greedy
/clear          forget the conversation
/stats          acceptance of all answers so far
/help           this list
/quit           end, as Ctrl-D does
Ctrl-C stops an answer. A \\ at the end of a line continues the message on the next one."""


@expanded("num_copy_tokens", "seed", "exact_head", "threads", "kv_cache_dtype", "device_map", max_tokens=512)
def chat(*, decoding: DecodingOptions, options: ModelOptions) -> None:
    """Chat with a model in the terminal; /help lists the commands. Piped lines are messages, answered in turn.

    Text of rounds that accepted drafts is green, or in brackets without colors; speed and acceptance follow each
    answer. A model without a chat template continues the text.
    """
    need_head = decoding.settings.num_speculative_tokens > 0
    settings, options = decoding.settings, options.prepared(need_head=need_head)
    loaded = options.load(need_head=need_head)
    print_notes(loaded.notes)
    _run(_Conversation(loaded, settings, options.backend, use_chat(loaded, None)))


@dataclass
class _Conversation:
    """The messages so far, and how the next one is answered."""

    model: "Model"
    settings: Settings
    backend: str
    chat: bool  # apply the chat template; else continue the text of all messages
    messages: list[dict[str, str]] = field(default_factory=list)
    rounds: "list[Round]" = field(default_factory=list)  # of all answers
    num_answers: int = 0

    def prompt(self, message: str) -> list[int]:
        """Add a message of the user's and return the tokens of the whole conversation."""
        from nextn.data.chat_template import apply_chat_template
        from nextn.decoding.generate import encode

        if not self.chat:
            continues_line = self.messages and not self.messages[-1]["content"].endswith("\n")
            self.messages.append({"role": "user", "content": f"\n{message}" if continues_line else message})
            return encode(self.model, "".join(each["content"] for each in self.messages))
        self.messages.append({"role": "user", "content": message})
        assert self.model.tokenizer is not None  # as it has a chat template
        return apply_chat_template(self.model.tokenizer, self.messages, add_generation_prompt=True)[0]

    def answer(self, message: str) -> None:
        """Print the answer as it is generated, then its figures. On an error, the message is forgotten."""
        num_before = len(self.messages)
        try:
            text = self._decode(self.prompt(message))
        except BaseException:
            del self.messages[num_before:]
            raise
        self.messages.append({"role": "assistant", "content": text})

    def _decode(self, prompt: list[int]) -> str:
        from nextn.decoding.generate import stream

        screen, text, log = console(), "", list["Round"]()
        marks, finish = Marks.of(screen), None
        settings = replace(self.settings, seed=self.settings.seed + self.num_answers)
        with stop_flag(signal.SIGINT) as stopped:
            for chunk in stream(self.model, [prompt], settings, backend=self.backend, on_round=log.append):
                text, finish = text + chunk.text, chunk.finish
                shown = marks.text(chunk.text, accepted=bool(chunk.round.num_accepted))
                screen.print(shown, end="", soft_wrap=True, highlight=False)
                if stopped() and finish is None:
                    finish = "stopped"
                    break
        self.num_answers += 1
        self.rounds += log
        ends = {"length": "  ended at --max-tokens", "context": "  ended at the end of the context"}
        end = "  stopped" if finish == "stopped" else ends.get(finish or "", "")
        summary = f"{speed(log)}  {acceptance_line(log)}{end}"
        screen.print(plain(f"\n{summary}", style="dim", lines=True), soft_wrap=True)
        return text

    def set_num_speculative_tokens(self, value: str) -> None:
        if value:
            if not value.isascii() or not value.isdigit():
                raise ConfigError(f"/k {value}; expected a whole number, such as 4, or 0 for plain decoding")
            if int(value) and self.model.head is None:
                raise ConfigError(f"/k {value}: the checkpoint has no head to draft with")
            self.settings = replace(self.settings, num_speculative_tokens=int(value))
        k = self.settings.num_speculative_tokens
        _say(f"K = {k}" if k else "K = 0 (plain decoding)")

    def set_temperature(self, value: str) -> None:
        if value:
            try:
                temperature = float(value)
            except ValueError as error:
                raise ConfigError(f"/temperature {value}; expected a number, such as 0.7, or 0 for greedy") from error
            sampling = replace(self.settings.sampling, temperature=temperature)
            self.settings = replace(self.settings, sampling=sampling)
        _say(f"temperature {self.settings.sampling.temperature:g}")

    def clear(self, _: str) -> None:
        self.messages.clear()
        _say("the conversation is forgotten")

    def stats(self, _: str) -> None:
        from nextn.stats.acceptance import Acceptance

        figures = Acceptance.of(self.rounds)
        _say(f"answers: {self.num_answers}  {acceptance_line(self.rounds)}")
        table = figures_table("depth", "drafts", "accepted", "rate", "95 % interval")
        depths = zip(figures.num_drafted, figures.num_accepted, figures.rates, figures.intervals(), strict=True)
        for depth, (drafted, accepted, rate, (low, high)) in enumerate(depths, 1):
            table.add_row(
                str(depth), str(drafted), str(accepted), rate_text(rate, digits=3), f"{low:.3f} to {high:.3f}"
            )
        if figures.num_rounds:
            print_table(table)

    def help(self, _: str) -> None:
        _say(_HELP)


def _say(text: str) -> None:
    console().print(plain(text, style="dim", lines=True), soft_wrap=True)


def _run(conversation: _Conversation) -> None:
    """Answer lines until their end or /quit. In a terminal, errors are shown and the conversation continues."""
    interactive = is_interactive()
    if interactive:
        template = "" if conversation.chat else "  (no chat template: your text is continued)"
        _say(f"/help lists the commands, Ctrl-D ends{template}")
    for line in read_lines("> "):
        if line.strip() == "/quit":
            return
        try:
            _handle(conversation, line)
        except ConfigError as error:
            if not interactive:
                raise
            print_error(error)


def _handle(conversation: _Conversation, line: str) -> None:
    commands: dict[str, Callable[[str], None]] = {
        "k": conversation.set_num_speculative_tokens,
        "temperature": conversation.set_temperature,
        "clear": conversation.clear,
        "stats": conversation.stats,
        "help": conversation.help,
    }
    command = re.fullmatch(r"/(\w+)(?:\s+(.*?))?\s*", line)
    if command is None:
        if line.strip():
            conversation.answer(line)
    elif command[1] in commands:
        commands[command[1]](command[2] or "")
    else:
        message = f"unknown command /{command[1]}; /help lists them. To send it as a message, begin with a space"
        raise ConfigError(message)
