"""Errors in OpenAI's form, `{"error": {"message", "type", "param", "code"}}`, and in that of Anthropic's routes."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nextn.errors import ConfigError, NextnError, QueueFullError

RETRY_AFTER_S = 1  # what a client is asked to wait when the queue is full
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
_ANTHROPIC_PATH = "/v1/messages"
_MAX_MESSAGE = 1000  # characters; messages may quote parts of the request
_LOG = logging.getLogger(__name__)
_NO_ROUTE = "there is no such route; chat and completions are at /v1/chat/completions and /v1/completions"


@dataclass
class ApiError(Exception):
    """An error that is sent to the client."""

    status: int
    message: str
    param: str | None = None  # the field of the request at fault
    code: str | None = None
    retry_after: int | None = None  # seconds

    def document(self, path: str = "") -> dict[str, object]:
        """Return the JSON body for the route at a path."""
        message = self.message[:_MAX_MESSAGE].encode(errors="replace").decode()
        if path.startswith(_ANTHROPIC_PATH):
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            details = {"details": {"error_code": self.code}} if self.code == "thread_not_found" else {}
            return {"type": "error", "error": {"type": kind, "message": message, **details}}
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def body(self, path: str = "") -> bytes:
        return json.dumps(self.document(path), ensure_ascii=False).encode()

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return headers if self.retry_after is None else headers | {"Retry-After": str(self.retry_after)}


def internal_error() -> ApiError:
    """An error of ours. What failed is in the server's log, not in the answer."""
    return ApiError(500, "the server failed on this request; see its log", code="internal_error")


def server_stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="server_stopping", retry_after=5)


def from_nextn_error(error: NextnError) -> ApiError:
    """Return the API error for an error of this package."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=RETRY_AFTER_S)
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), code="invalid_value")
    return internal_error()


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error as `api_errors` writes it."""
    for kind in (ApiError, NextnError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    shown = _shown(request, error)
    if isinstance(error, NextnError) and shown.status >= 500:  # of others, uvicorn logs the traceback
        _LOG.error("%s %s failed", request.method, request.url.path[:200], exc_info=error)
    response = JSONResponse(shown.document(request.url.path), shown.status, headers=dict(shown.headers))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def _shown(request: Request, error: Exception) -> ApiError:
    """What the client gets to know of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NextnError):
        return from_nextn_error(error)
    if not isinstance(error, HTTPException):
        return internal_error()
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    what = {404: _NO_ROUTE, 405: "the route has other methods"}.get(error.status_code, error.detail)
    return ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {what}", code=code)
