"""An answer as a sequence of blocks, reasoning, text and tool calls, as the newer protocols send it."""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from nextn.serve.message_parser import MessageDelta, MessageParser, ToolCallDelta, parse_message
from nextn.serve.options import ServerOptions
from nextn.serve.request import GenerationChunk, GenerationRequest
from nextn.serve.responses import GeneratedChoice, Json, sse_data
from nextn.serve.schemas import SamplingFields
from nextn.serve.token_sampler import TokenTexts


@dataclass
class Block:
    """One part of an answer, complete or not."""

    kind: Literal["reasoning", "text", "call"]
    index: int  # in the answer
    name: str = ""  # of the tool that is called
    text: str = ""  # a call's are its arguments, as JSON
    is_complete: bool = True  # false: the text ended inside, or the call is malformed
    id: str = field(default_factory=lambda: secrets.token_hex(12))


BlockEvent = tuple[Literal["start", "more", "end"], Block, str]  # what happened, where, and the new text


class BlockAnswer:
    """The blocks of one sequence. parser: Splits its text; None: all of it is content."""

    def __init__(self, request: GenerationRequest, parser: MessageParser | None, token_texts: TokenTexts) -> None:
        self.request, self.token_texts, self.id = request, token_texts, secrets.token_hex(12)
        self.choice, self.blocks = GeneratedChoice(), list[Block]()
        self._parser = parser
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}  # by their index among the calls

    @property
    def has_calls(self) -> bool:
        """Whether the answer has a complete call."""
        return any(block.kind == "call" and block.is_complete for block in self.blocks)

    @property
    def stop_string(self) -> str | None:
        """The string that ended the text, if one did."""
        if self.choice.finish != "stop":
            return None
        skip, text = self.request.skip_special_tokens, self.choice.text
        decoded = self.token_texts.running_text(self.choice.tokens, skip_special_tokens=skip)
        return next((stop for stop in self.request.stop if decoded.startswith(text + stop)), self.request.stop[0])

    def build(self) -> None:
        """Build the blocks of the complete text, in which calls that are malformed are content."""
        delta = parse_message(self._parser, self.choice.text)
        pieces = tuple(piece for piece in delta.pieces if isinstance(piece, str) or piece.is_last)
        for _ in self._events(replace(delta, pieces=pieces), is_last=True):
            pass

    def push(self, chunk: GenerationChunk) -> Iterator[BlockEvent]:
        """Add a chunk and yield what happens to the blocks."""
        self.choice.add(chunk)
        is_last = chunk.finish is not None
        yield from self._events(parse_message(self._parser, chunk.text, is_last=is_last), is_last=is_last)

    def _events(self, delta: MessageDelta, *, is_last: bool) -> Iterator[BlockEvent]:
        yield from self._text("reasoning", delta.reasoning)
        for piece in delta.pieces:
            yield from self._text("text", piece) if isinstance(piece, str) else self._call(piece)
        if is_last:
            if not self.blocks:
                yield from self._start("text")
            if self.blocks[-1] is self._open and self.choice.finish in ("length", "context"):
                self._open.is_complete = False
            yield from self._end()

    def _text(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[BlockEvent]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._start(kind)
        self.blocks[-1].text += text
        yield "more", self.blocks[-1], text

    def _call(self, call: ToolCallDelta) -> Iterator[BlockEvent]:
        if call.name is not None:
            yield from self._start("call", call.name)
            self._calls[call.index] = self.blocks[-1]
        block = self._calls[call.index]
        block.text += call.arguments
        block.is_complete = call.is_last
        if call.arguments:
            yield "more", block, call.arguments
        if call.is_last:
            yield from self._end()

    def _start(self, kind: Literal["reasoning", "text", "call"], name: str = "") -> Iterator[BlockEvent]:
        yield from self._end()
        self._open = Block(kind, len(self.blocks), name, is_complete=kind != "call")
        self.blocks.append(self._open)
        yield "start", self._open, ""

    def _end(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            block, self._open = self._open, None
            yield "end", block, ""


class BlockRouteAnswer:
    """The answer of a route whose events name their type; a subclass knows their form."""

    end = b""

    def __init__(
        self,
        options: ServerOptions,
        body: SamplingFields,
        request: GenerationRequest,
        token_texts: TokenTexts,
        parser: MessageParser | None,
    ) -> None:
        self._request, self._model, self.is_stream = request, options.served_name, body.stream
        self._blocks = BlockAnswer(request, parser, token_texts)

    def frame(self, events: Iterable[Json]) -> bytes:
        return b"".join(f"event: {event['type']}\n".encode() + sse_data(event) for event in events)

    def add(self, index: int, chunk: GenerationChunk) -> None:
        self._blocks.choice.add(chunk)
