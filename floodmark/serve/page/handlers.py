"""The page at `/`: the state of the lake, for people, rendered here; a small script keeps it current while it is open.

It shows the overview behind all other answers. If the overview cannot be read, the page reports that with status 503:
it never shows a state that it does not know. Nothing is loaded from elsewhere, the page has no inline script or style,
and every text from the lake is escaped. Where tokens are set, a form puts one into a cookie that scripts cannot read
and that pages of other sites cannot send.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, HTTPException, Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from pyarrow import ArrowException

import floodmark
from floodmark import clock, log
from floodmark.errors import FloodmarkError, NotFound
from floodmark.lake import Lake
from floodmark.model import Value
from floodmark.report.overview import overview
from floodmark.report.tables import TableLine, table_contents, table_details
from floodmark.serve.http.access import COOKIE, LOCAL_CALLER, Caller, Refused, is_same_origin
from floodmark.serve.http.body import MemoryBudget, RequestLimits, TooLarge, read_body
from floodmark.serve.http.readiness import unreadable
from floodmark.serve.http.service import Service
from floodmark.serve.http.timeseries import Figures
from floodmark.serve.http.workers import SharedAnswer
from floodmark.serve.page import wording
from floodmark.serve.page.api_docs import forms_of, operations_of
from floodmark.serve.page.content import ExampleColumn, View, view_of
from floodmark.write.shape import TABLE_NAME

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
STATIC = {"floodmark.js": "text/javascript", "floodmark.css": "text/css", "icon.svg": "image/svg+xml"}
# A form that holds one token.
FORM_BYTES_MAX = 4_096
# Partitions and files of a table.
LINES_MAX = 50
# Of a value in a sample.
SAMPLE_CHARACTERS_MAX = 120
WRONG_TOKEN = "Invalid token."


def add_page(app: FastAPI, service: Service) -> None:
    """Add the page after the questions of the API: the charts show their figures."""
    figures: Figures = app.state.figures

    def look() -> View:
        found = overview(service.lake.catalog, service.keeping)
        return view_of(found, figures.series(), _first_columns(service.lake, found.tables))

    shared = SharedAnswer(service.workers, look)

    @app.get("/", include_in_schema=False)
    async def page(request: Request, fragment: bool = False) -> Response:
        caller = service.access.caller(request)
        if caller is None:
            if fragment:
                raise Refused(401, "a token of the lake is required", "Sign in at /login.")
            return _sent("/login")
        try:
            view = await shared.ask()
            # In a thread too: requests that send rows meanwhile must not wait for it.
            return _html(await service.workers.ask(_known, request, service, caller, view, fragment))
        except Exception as error:  # noqa: BLE001 - any error: a state that cannot be read is shown as unknown
            log.get().warning("the page has no state to show", cause=repr(error))
            return _html(_unknown(request, service, caller, unreadable(error)), 503)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(request: Request, name: str, v: str = "") -> Response:
        if name not in STATIC:
            raise HTTPException(404)
        content, digest = _static(name)
        # A name that contains the digest never changes its content.
        keeping = "public, max-age=31536000, immutable" if v == digest else "no-cache"
        headers = {"ETag": f'"{digest}"', "Cache-Control": keeping, "X-Content-Type-Options": "nosniff"}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, 200, headers, STATIC[name])

    _add_beside(app, service)
    if service.access.has_tokens:
        _add_login(app, service)


def _add_beside(app: FastAPI, service: Service) -> None:
    """One table, and the API."""

    @app.get("/tables/{table}", include_in_schema=False)
    async def table_page(request: Request, table: str) -> Response:
        if service.access.caller(request) is None:
            return _sent("/login")
        place = {"name": table[:SAMPLE_CHARACTERS_MAX], "place": service.lake.location}
        try:
            return _html(await service.workers.ask(_table_page, service, table, place))
        except NotFound as error:
            return _html(_render("table.html", **place, table=None, reason=error.message), 404)
        except Exception as error:  # noqa: BLE001 - any error: the page reports what cannot be read
            log.get().warning("the page of a table has nothing to show", cause=repr(error))
            return _html(_render("table.html", **place, table=None, reason=unreadable(error)), 503)

    @app.get("/docs", include_in_schema=False)
    async def api_docs(request: Request) -> Response:
        """As open as /openapi.json: it describes requests, and nothing of the lake."""
        document = app.openapi()
        base_url = str(request.base_url).rstrip("/")
        operations, forms = operations_of(document["paths"]), forms_of(document["components"]["schemas"])
        return _html(_render("docs.html", operations=operations, forms=forms, base_url=base_url))


def _add_login(app: FastAPI, service: Service) -> None:
    @app.get("/login", include_in_schema=False)
    async def form(request: Request) -> Response:
        return _sent("/") if service.access.caller(request) else _html(_render("login.html", wrong=""))

    @app.post("/login", include_in_schema=False)
    async def login(request: Request) -> Response:
        _check_own_page(request)
        text = await _form_token(request, service.limits)
        if service.access.token_of(text) is None:
            return _html(_render("login.html", wrong=WRONG_TOKEN), 401)
        response = _sent("/")
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, text, httponly=True, samesite="strict", secure=secure, path="/")
        return response

    @app.post("/logout", include_in_schema=False)
    async def logout(request: Request) -> Response:
        _check_own_page(request)
        response = _sent("/login")
        response.delete_cookie(COOKIE, httponly=True, samesite="strict", path="/")
        return response


def _check_own_page(request: Request) -> None:
    """Reject forms that pages of other sites send."""
    origin = request.headers.get("origin")
    if origin is not None and not is_same_origin(origin, request.headers.get("host")):
        raise Refused(403, "a page of another origin may not sign in or out")


async def _form_token(request: Request, limits: RequestLimits) -> str:
    """The token of a form that arrives in time; empty if the form is too long to hold a token."""
    limits = replace(limits, body_bytes_max=FORM_BYTES_MAX)
    try:
        with MemoryBudget(FORM_BYTES_MAX).held() as held:
            body = await read_body(request.stream(), request.headers.get("content-length"), limits, held)
    except TooLarge:
        return ""
    return parse_qs(body.decode("ascii", "replace")).get("token", [""])[0].strip()


def _table_page(service: Service, table: str, place: Mapping[str, str]) -> str:
    lake = service.lake
    if not TABLE_NAME.fullmatch(table):
        raise NotFound("there is no such table")
    catalog = lake.catalog
    about = table_details(lake.engine, catalog.history.head(table), service.keeping)
    contents = catalog.at_head(table, lambda head: table_contents(catalog, head, LINES_MAX))
    # Each commit with what it did to this table.
    commits = [
        (one, next((part.change for part in one.tables if part.table == table), ""))
        for one in lake.history(table=table)
    ]
    sample, problem = list[list[str | None]](), ""
    try:
        sample = [[_cell(row.get(one.name)) for one in about.columns] for row in lake.sample(table)]
    except (FloodmarkError, OSError, ArrowException) as error:
        problem = unreadable(error)  # the rest is shown all the same
    return _render(
        "table.html",
        **place,
        table=about,
        contents=contents,
        commits=commits,
        sample=sample,
        sample_error=problem,
        now=clock.now_ms(),
    )


def _cell(value: Value) -> str | None:
    text = None if value is None else str(value)
    return text if text is None or len(text) <= SAMPLE_CHARACTERS_MAX else f"{text[: SAMPLE_CHARACTERS_MAX - 1]}…"


def _first_columns(lake: Lake, tables: Sequence[TableLine]) -> list[ExampleColumn]:
    """The columns of the first table, for the examples. None if they cannot be read: the page must not fail because of
    an example."""
    try:
        schema = lake.schema(tables[0].table) if tables else None
    except FloodmarkError:
        return []
    fields = () if schema is None else schema.fields
    return [ExampleColumn(one.name, str(one.field_type)) for one in fields if not one.name.startswith("_")]


# ── what is sent ──


def _known(request: Request, service: Service, caller: Caller, view: View, fragment: bool) -> str:
    return _render(
        "parts.html" if fragment else "page.html",
        **_common(request, service, caller, view.now_ms),
        view=view,
        title=f"{view.health.word} – {_short_name(service.lake.location)} – Floodmark",
        reason="",
    )


def _unknown(request: Request, service: Service, caller: Caller, reason: str) -> str:
    common = _common(request, service, caller, clock.now_ms())
    return _render("page.html", **common, view=None, title="State unknown – Floodmark", reason=f"{_sentence(reason)}")


def _common(
    request: Request, service: Service, caller: Caller, now_ms: int
) -> dict[str, str | bool | wording.ShownTime | None]:
    return {
        "at": wording.moment(now_ms, now_ms),
        "place": service.lake.location,
        "base_url": str(request.base_url).rstrip("/"),
        "release": floodmark.__version__,
        "may_admin": caller.may("admin"),
        "caller_name": "" if caller is LOCAL_CALLER else f"{caller.name}, {caller.role}",
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _short_name(location: str) -> str:
    return location.rstrip("/").rsplit("/", 1)[-1]


def _html(text: str, status: int = 200) -> Response:
    return Response(text, status, HEADERS, "text/html; charset=utf-8")


def _sent(to: str) -> Response:
    return Response(status_code=303, headers={**HEADERS, "Location": to})


@cache
def _static(name: str) -> tuple[bytes, str]:
    content = files("floodmark.serve.page").joinpath("static", name).read_bytes()
    return content, hashlib.sha256(content).hexdigest()[:12]


def _asset(name: str) -> str:
    return f"/static/{name}?v={_static(name)[1]}"


@cache
def _templates() -> Environment:
    # Undefined is an error: a missing figure must not look like an empty one.
    made = Environment(
        loader=PackageLoader("floodmark.serve.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {
        "asset": _asset,
        "moment": wording.moment,
        "pieces": wording.pieces,
        "count": wording.count_text,
        "count_of": wording.count_of,
        "short": wording.short_text,
        "size": wording.size_text,
        "span": wording.span_text,
        "words": wording.outcome_text,
        "join": wording.join_text,
        "error_line": wording.error_line,
        "quoted": shlex.quote,
    }
    return made


def _render(template: str, /, **values: Any) -> str:
    return _templates().get_template(template).render(**values)
