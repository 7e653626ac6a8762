"""The routes: OpenAI's completions, chat and models, vLLM's tokenize and detokenize, health, metrics, the page.

Knows nothing of sockets (`http_server`), of how text is generated (`request.Engine`), or of the fields of requests
(`schemas`).
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from nextn import __version__
from nextn.bounded_json import loads
from nextn.model.model import Model
from nextn.serve import anthropic_messages, openai_responses
from nextn.serve.anthropic_messages import MESSAGES_PATH, CountRequest, MessagesAnswer, MessagesRequest
from nextn.serve.api_errors import ApiError, add_error_handlers, server_stopping
from nextn.serve.generation_group import GenerationGroup
from nextn.serve.http_limits import CLIENT_GONE, IGNORED_HEADER, RequestGuard, ignored_fields
from nextn.serve.metrics import CONTENT_TYPE, ServerMetrics
from nextn.serve.openai_responses import ResponsesAnswer, ResponsesRequest, ResponseStore
from nextn.serve.options import ServerOptions
from nextn.serve.request import Engine, EngineStats, GenerationRequest
from nextn.serve.request_builder import RequestBuilder
from nextn.serve.request_model import M, parse_request
from nextn.serve.responses import ChatAnswer, CompletionAnswer, Json, RouteAnswer
from nextn.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from nextn.serve.token_sampler import TokenTexts

_LOG = logging.getLogger(__name__)
_POLL_S = 0.02  # between two looks at what still runs while the server stops
_WATCH_S = 0.2  # between looks at the files of the weights while an answer is made
_CLOSE_S = 2.0  # for the engine to end, after the generations did
# The page is one file; it loads nothing and talks to this server only.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_app(engine: Engine, model: Model, options: ServerOptions) -> FastAPI:
    """Return the ASGI application; `app.state.api` is its `Api`, whose `stop` closes the engine."""
    api = Api(engine, model, options)
    # No generated pages about the API: they load scripts from other sites.
    app = FastAPI(title="nextn", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.state.api = api
    for method, path, endpoint in api.routes():
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    add_error_handlers(app)
    app.add_middleware(RequestGuard, options=options, on_error=api.metrics.count_error)
    if options.cors_origins:
        # Any header: clients have their own, such as the x-stainless-... of OpenAI's, and none is trusted here.
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"], expose_headers=[IGNORED_HEADER],
        )  # fmt: skip
    return app


class Api:
    """The endpoints, and the generations that run for them."""

    def __init__(self, engine: Engine, model: Model, options: ServerOptions) -> None:
        self.engine, self.model, self.options = engine, model, options
        self.metrics = ServerMetrics(options.served_name, engine.stats)
        self.builder = RequestBuilder(model, options)
        self.token_texts = TokenTexts(model.tokenizer)
        self.is_stopping = self._noted_replaced = False
        self._groups: set[GenerationGroup] = set()
        self._created, self._stored = int(time.time()), ResponseStore()

    def routes(self) -> Iterator[tuple[str, str, Callable[..., Awaitable[Response]]]]:
        """Yield method, path and endpoint."""
        yield from (
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/responses", self.responses),
            ("POST", MESSAGES_PATH, self.messages),
            ("POST", f"{MESSAGES_PATH}/count_tokens", self.count_tokens),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.one_model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/health", self.health),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.read_metrics),
            ("GET", "/", self.page),
        )

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatRequest)
        requests = await self.builder.chat(body)
        parsers = [self.builder.structured.parser(body, one.prompt) for one in requests]
        answer = ChatAnswer(self.options, body, requests, self.token_texts, parsers)
        return await self._generate(request, requests, answer)

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionRequest)
        requests = await self.builder.completion(body)
        answer = CompletionAnswer(self.options, body, requests, self.token_texts)
        return await self._generate(request, requests, answer)

    async def responses(self, request: Request) -> Response:
        body = await self._body(request, ResponsesRequest)
        before = () if body.previous_response_id is None else self._stored.get(body.previous_response_id)
        chat, history = openai_responses.to_chat(body, before)
        (one,) = await self.builder.chat(chat)
        parser = self.builder.structured.parser(chat, one.prompt)
        answer = ResponsesAnswer(self.options, body, one, self.token_texts, parser, history=history, store=self._stored)
        return await self._generate(request, [one], answer)

    async def messages(self, request: Request) -> Response:
        body = await self._body(request, MessagesRequest)
        chat = anthropic_messages.to_chat(body)
        (one,) = await self.builder.chat(chat)
        parser = self.builder.structured.parser(chat, one.prompt)
        return await self._generate(request, [one], MessagesAnswer(self.options, body, one, self.token_texts, parser))

    async def count_tokens(self, request: Request) -> Response:
        body = await self._body(request, CountRequest)
        prompt = await self.builder.chat_prompt(anthropic_messages.to_chat(body))
        return JSONResponse({"input_tokens": len(prompt)})

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_entry()]})

    async def one_model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model_entry())

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeRequest)
        tokens = await self.builder.tokens_of(body)
        strings = self.builder.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        limit = self.options.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeRequest)
        return JSONResponse({"prompt": await self.builder.text_of(body)})

    async def health(self) -> Response:
        files = self.options.weight_files
        changed = files is not None and files.changed() is not None
        status = "stopping" if self.is_stopping else "model_files_changed" if changed else "ok"
        document = {"status": status, **self._health(self.engine.stats()), **self._replaced()}
        return JSONResponse(document, 200 if status == "ok" else 503)

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def read_metrics(self) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def page(self) -> Response:
        page = files("nextn.serve") / "page" / "index.html"
        if not page.is_file():
            raise ApiError(404, "this installation has no page; the API is at /v1", code="not_found")
        return HTMLResponse(page.read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    async def stop(self) -> None:
        """Let what runs end within the grace time, then end it with an error. New requests are refused."""
        self.is_stopping = True
        grace_s = self.options.grace_s
        closing = threading.Thread(target=partial(self.engine.close, grace_s=grace_s), daemon=True)
        closing.start()
        await self._until(lambda: not self._groups, grace_s)
        self.fail_all()
        await self._until(lambda: not closing.is_alive(), _CLOSE_S)
        self.builder.close()

    def fail_all(self) -> None:
        """End everything that runs at once, with an error."""
        for group in list(self._groups):
            group.fail(server_stopping())

    @staticmethod
    async def _until(is_done: Callable[[], bool], seconds: float) -> None:
        ends = time.monotonic() + seconds
        while not is_done() and time.monotonic() < ends:
            await asyncio.sleep(_POLL_S)

    async def _body(self, request: Request, model: type[M]) -> M:
        """Read and check the body. Raises ApiError."""
        if self.is_stopping:
            raise server_stopping()
        self._check_files()
        try:
            raw = await request.body()
        except ClientDisconnect as error:
            raise ApiError(CLIENT_GONE, "the body is incomplete") from error
        try:
            document = loads(raw.decode())
        except ValueError as error:  # also invalid UTF-8
            raise ApiError(400, f"the body is not JSON in UTF-8: {error}", code="invalid_json") from error
        body = parse_request(model, document, ignored_fields(request.scope))
        if (name := getattr(body, "model", None)) is not None:
            self._check_model(name)
        return body

    def _check_files(self) -> None:
        """Raise ApiError if the weights were changed below the model: its answers would be of no model at all."""
        files = self.options.weight_files
        changed = None if files is None else files.changed()
        if changed is not None:
            message = f"{changed.name} was changed while it is served; start the server again"
            raise ApiError(503, message, code="model_files_changed")
        if not self._noted_replaced and (note := self._replaced()):
            self._noted_replaced = True
            _LOG.warning("note: %s", note["weights"])

    def _replaced(self) -> dict[str, str]:
        """What `/health` adds if another file has taken the place of one that is served."""
        files = self.options.weight_files
        file = None if files is None else files.replaced()
        what = f"{file.name if file else ''} was replaced or removed on disk; the weights that were loaded are served"
        return {"weights": f"{what} until the server is started again"} if file else {}

    def _watch_files(self, group: GenerationGroup) -> None:
        """End a running generation as soon as the weights have changed."""
        if group not in self._groups:
            return
        try:
            self._check_files()
        except ApiError as error:
            group.fail(error)
            return
        asyncio.get_running_loop().call_later(_WATCH_S, self._watch_files, group)

    def _check_model(self, name: str) -> None:
        if name != self.options.served_name:
            message = f"The model {name[:200]!r} does not exist; this server has {self.options.served_name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def _generate(self, request: Request, requests: list[GenerationRequest], answer: RouteAnswer) -> Response:
        if self.is_stopping:
            raise server_stopping()
        group = GenerationGroup(self.engine, self.metrics)
        group.submit(requests)
        if answer.is_stream:
            return _EventStream(self._events(group, answer), self._running(group))
        return await self._complete_answer(request, group, answer)

    async def _complete_answer(self, request: Request, group: GenerationGroup, answer: RouteAnswer) -> Response:
        """Collect the whole answer, or give up when the client goes away."""
        with self._running(group):
            collecting = asyncio.create_task(_collect(group, answer))
            leaving = asyncio.create_task(_disconnected(request))
            try:
                await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if collecting.done():
                    result = collecting.result()
                    self._check_files()
                    return JSONResponse(result)
                return Response(status_code=CLIENT_GONE)
            finally:
                collecting.cancel()
                leaving.cancel()

    async def _events(self, group: GenerationGroup, answer: RouteAnswer) -> AsyncIterator[bytes]:
        try:
            if first := answer.frame(answer.first_events()):
                yield first
            async for batch in group.batches():
                if data := answer.frame(event for each in batch for event in answer.events(*each)):
                    yield data
            self._check_files()
            if last := answer.frame(answer.last_events()):
                yield last
        except ApiError as error:
            yield answer.frame([answer.error_event(error)])
        yield answer.end

    @contextmanager
    def _running(self, group: GenerationGroup) -> Iterator[None]:
        """Whatever happens, a request's generations end with it."""
        self._groups.add(group)
        limit_s = self.options.request_s
        too_long = ApiError(504, f"the answer took more than {limit_s:g} s", code="request_timeout")
        timer = asyncio.get_running_loop().call_later(limit_s, group.fail, too_long)
        self._watch_files(group)
        try:
            yield
        finally:
            timer.cancel()
            group.cancel()
            self._groups.discard(group)

    def _model_entry(self) -> Json:
        name, limit = self.options.served_name, self.options.max_model_len
        created = datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z")
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "nextn", "root": name}
        anthropic = {"type": "model", "display_name": name, "created_at": created}
        return about | {"parent": None, "max_model_len": limit} | anthropic

    def _health(self, stats: EngineStats) -> Json:
        return {
            "model": self.options.served_name,
            "version": __version__,
            "chat": self.model.tokenizer is not None and bool(self.model.tokenizer.chat_template),
            "max_model_len": self.options.max_model_len,
            "num_speculative_tokens": self.options.num_speculative_tokens,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "cache": {"positions": stats.cache_positions, "max_positions": stats.max_cache_positions},
            "prefix_cache": {
                "positions": stats.prefix_positions,
                "max_positions": stats.max_prefix_positions,
                "queries": stats.prefix_queries,
                "hits": stats.prefix_hits,
            },
            "cost_curve": list(stats.cost_curve),
            "draft_cost": stats.draft_cost,
            "is_measuring": stats.is_measuring,
            "reference": list(self.options.reference_rates) or None,
        }


class _EventStream(StreamingResponse):
    """A stream inside a context that is left whatever happens to it, also if the client goes before the first event."""

    def __init__(self, events: AsyncIterator[bytes], context: AbstractContextManager[None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._context:
            await super().__call__(scope, receive, send)


async def _collect(group: GenerationGroup, answer: RouteAnswer) -> Json:
    async for batch in group.batches():
        for index, chunk in batch:
            answer.add(index, chunk)
    return answer.document()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
