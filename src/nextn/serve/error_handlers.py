"""What a failed request is answered with, in the form of its route."""

import logging

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nextn.errors import NextnError
from nextn.serve.api_errors import ApiError, from_nextn_error, internal_error

_LOG = logging.getLogger(__name__)
_NO_ROUTE = "there is no such route; chat and completions are at /v1/chat/completions and /v1/completions"


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error as `api_errors` writes it."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(NextnError, _on_nextn_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_exception)


def _response(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.document(request.url.path), error.status, headers=dict(error.headers))


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(request, error)


async def _on_nextn_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, NextnError)
    shown = from_nextn_error(error)
    if shown.status >= 500:
        _LOG.error("%s %s failed", request.method, request.url.path[:200], exc_info=error)
    return _response(request, shown)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    what = {404: _NO_ROUTE, 405: "the route has other methods"}.get(error.status_code, error.detail)
    shown = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {what}", code=code)
    response = _response(request, shown)
    response.headers.update(error.headers or {})
    return response


async def _on_exception(request: Request, error: Exception) -> Response:
    """uvicorn logs the traceback; the client gets none."""
    return _response(request, internal_error())
