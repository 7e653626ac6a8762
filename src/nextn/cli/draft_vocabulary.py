"""Options of commands that can draft from a part of the vocabulary."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextn.cli.screen import print_note
from nextn.errors import ConfigError

if TYPE_CHECKING:
    from nextn.model.model import Model

DraftVocab = Annotated[
    str,
    typer.Option(
        help="Draft only from the N most frequent tokens of --draft-text; auto = the N that is fastest; 0 = from all."
    ),
]
DraftText = Annotated[Path | None, typer.Option(help="Text file similar to the text that will be generated.")]


@dataclass(frozen=True)
class DraftVocabularyOptions:
    """--draft-vocab and its text; size None: auto, 0: off."""

    size: int | None
    text: str = ""

    @classmethod
    def read(cls, vocab: str, text: Path | None) -> "DraftVocabularyOptions":
        """Check the options and read the text. Raises ConfigError."""
        if vocab != "auto" and not vocab.isdecimal():
            raise ConfigError(f"--draft-vocab {vocab!r}; expected a number of tokens, auto, or 0 for all tokens")
        size = None if vocab == "auto" else int(vocab)
        if size == 0 and text is None:
            return cls(0)
        if size == 0 or text is None:
            raise ConfigError(
                "--draft-vocab N|auto and --draft-text FILE belong together: drafts are the frequent tokens of FILE"
            )
        try:
            return cls(size, text.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--draft-text {text}: not a readable text: {error}") from error

    def apply(self, model: "Model", *, num_speculative_tokens: int, backend: str = "auto") -> None:
        """Restrict what the head drafts from. Raises ConfigError if that is impossible.

        num_speculative_tokens: The largest K that will be used.
        """
        if self.size == 0:
            return
        from nextn.decoding.generate import encode, eos_tokens

        if model.head is None or not num_speculative_tokens:
            raise ConfigError("--draft-vocab: nothing is drafted, as the model has no head or K is 0")
        tokens, always = encode(model, self.text), eos_tokens(model)
        if self.size is None:
            self._choose(model, tokens, always, num_speculative_tokens, backend)
            return
        from nextn.speculative.draft_vocabulary import DraftVocabulary

        vocab_size = model.trunk.vocab_size
        model.head.draft_vocabulary = DraftVocabulary.of([tokens], self.size, vocab_size=vocab_size, always=always)

    def _choose(self, model: "Model", tokens: list[int], always: tuple[int, ...], k: int, backend: str) -> None:
        from nextn.evaluate.draft_vocabulary_size import choose_draft_vocabulary

        choice = choose_draft_vocabulary(model, tokens, num_speculative_tokens=k, always=always, backend=backend)
        whole = choice.estimates[-1]
        if choice.vocabulary is None:
            print_note(f"--draft-vocab auto: all {whole.size} tokens, as no smaller number is faster here")
            return
        print_note(
            f"--draft-vocab auto: {len(choice.vocabulary)} of {whole.size} tokens; {choice.speedup:.2f} x plain "
            f"decoding expected, {whole.speedup:.2f} x with all"
        )
