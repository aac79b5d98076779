"""Errors as documents that programs can read (RFC 9457), with the wrong value, the expectation and the remedy."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from farpool.cluster.manager.access import Denied
from farpool.cluster.manager.calls import BusyError
from farpool.cluster.node.logs import log
from farpool.errors import ConfigError, FarpoolError, RegistryAwayError, RegistryError, RegistryReplacedError

__all__ = ["MEDIA_TYPE", "Problem", "ProblemDocument", "add_handlers", "refused_as"]

MEDIA_TYPE = "application/problem+json"
_AWAY_RETRY_S = 2
_SHOWN_CHARACTERS_MAX = 200


class ProblemDocument(BaseModel):
    """An error, as in RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    value: str | None = None
    expected: str | None = None
    remedy: str | None = None


class Problem(Exception):  # noqa: N818 - it is the answer to a request, and no error of this program
    """Ends a request with an error.

    Parameters
    ----------
    status : int
        HTTP status.
    detail : str
        The error. A text in the house's form, ``... is VALUE, expected ...; REMEDY``, also gives the fields.
    value, expected, remedy : str, optional
        Fields of the document; by default the parts of `detail`.
    retry_after : float
        Seconds after which the caller may try again; 0.0 if that does not help.
    more : mapping of str to object, optional
        Further fields of the document.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        value: str | None = None,
        expected: str | None = None,
        remedy: str | None = None,
        retry_after: float = 0.0,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.more = dict(more or {})
        self.status, self.detail, self.retry_after = status, detail, retry_after
        _, separator, rest = detail.partition("expected ")
        parts = rest.split("; ") if separator else detail.split("; ")
        self.value = value
        self.expected = expected if expected is not None else parts[0] if separator else None
        self.remedy = remedy if remedy is not None else parts[-1] if len(parts) > 1 else None


@contextmanager
def refused_as(status: int, value: str) -> Iterator[None]:
    """Turn a `ConfigError` of the block into a `Problem` with this status, about this value of the request."""
    try:
        yield
    except ConfigError as error:
        raise Problem(status, str(error), value=value) from error


def add_handlers(app: FastAPI) -> None:
    """Make an application answer every error with a problem document."""

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> JSONResponse:
        return _response(request, error)

    @app.exception_handler(Denied)
    async def denied(request: Request, error: Denied) -> JSONResponse:
        return _response(request, Problem(error.status, str(error), expected=error.expected, remedy=error.remedy))

    @app.exception_handler(BusyError)
    async def busy(request: Request, _: BusyError) -> JSONResponse:
        return _response(request, Problem(503, "too many requests wait for the registry; try again", retry_after=1))

    @app.exception_handler(FarpoolError)
    async def farpool_error(request: Request, error: FarpoolError) -> JSONResponse:
        if isinstance(error, RegistryReplacedError):
            request.app.state.manager.end(error)
        if isinstance(error, RegistryAwayError):
            return _response(request, Problem(503, str(error), retry_after=_AWAY_RETRY_S))
        if isinstance(error, RegistryError):
            return _response(request, Problem(503, str(error), retry_after=_AWAY_RETRY_S))
        status = 400 if isinstance(error, ConfigError) else 503
        return _response(request, Problem(status, str(error), retry_after=0 if status == 400 else _AWAY_RETRY_S))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _response(request, _invalid(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        path = _shown(request.url.path)
        if error.status_code == 404:
            found = Problem(404, f"there is nothing at {path}, expected a path of /openapi.json", value=path)
        else:
            found = Problem(error.status_code, f"{request.method} {path}: {error.detail}", value=request.method)
        return _response(request, found, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        log("failed", level=logging.ERROR, path=request.url.path, detail="".join(traceback.format_exception(error)))
        return _response(request, Problem(500, "the manager has a fault, which its log describes; report it"))


def _response(request: Request, problem: Problem, headers: dict[str, str] | None = None) -> JSONResponse:
    # The audit log has the reason, too.
    request.state.detail = problem.detail
    headers = dict(headers or {})
    if problem.retry_after:
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after)))
    if problem.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="farpool"'
    document = ProblemDocument(
        title=HTTPStatus(problem.status).phrase,
        status=problem.status,
        detail=problem.detail,
        value=problem.value,
        expected=problem.expected,
        remedy=problem.remedy,
    )
    return JSONResponse({**document.model_dump(), **problem.more}, problem.status, headers, MEDIA_TYPE)


def _invalid(error: RequestValidationError) -> Problem:
    first: dict[str, Any] = next(iter(error.errors()), {"loc": ("body",), "msg": "it cannot be read", "input": None})
    place = ".".join(str(part) for part in first["loc"])
    value, expected = _shown(first.get("input")), str(first["msg"])
    return Problem(
        422,
        f"{place} is {value}, expected: {expected}; /openapi.json describes the request",
        value=value,
        expected=expected,
        remedy="/openapi.json describes the request",
    )


def _shown(value: object) -> str:
    """Format a value of a request in ASCII, because it may have characters that JSON in UTF-8 cannot have."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "..."
