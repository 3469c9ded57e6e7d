"""Lookups over HTTP: rows of a table by key or by values, as `floodmark get` and `lookup` find them.

`key` is a key, more of them are several; any other parameter that is not one of the address's own names a column. One
key without a row is 404, with what was looked at; of several keys, those without a row are in the answer. A key that is
not there while a history has gaps is 503: it may come. Reading needs the role `read`; keys and rows are bounded (I14).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response

from floodmark.errors import Invalid, NotFound
from floodmark.json_form import as_json
from floodmark.lookups import FoundRows, Moment, find_keys, find_values, no_row
from floodmark.model import MAIN
from floodmark.serve.http.answers import answer, json_text
from floodmark.serve.http.api import NAME_CHARACTERS_MAX, VERSION_MAX, TableName, known_form
from floodmark.serve.http.edge import ByColumns
from floodmark.serve.http.openapi import Described, Failed, errors
from floodmark.serve.http.service import Service

KEYS_MAX = 100
ROWS_MAX = 1_000
_OWN = frozenset({"key", "null", "limit", "order", "after", "columns", "version", "branch"})
_REFUSED = "A key, value, column or cursor does not fit the table."
_INCOMPLETE = "The key is not in the table, but a history that fills it has gaps; or a required service did not answer."
_ERRORS: Described = {
    **errors(401, 403, 404, 410),
    422: {"model": Failed, "description": _REFUSED},
    503: {"model": Failed, "description": f"{_INCOMPLETE} Send again after Retry-After."},
}


def add_lookup(app: FastAPI, service: Service) -> None:
    lake = service.lake

    async def lookup(
        request: Request,
        table: TableName,
        key: Annotated[
            list[str] | None,
            Query(max_length=KEYS_MAX, description="A key; of several columns as a JSON list, in the table's order."),
        ] = None,
        null: Annotated[list[str] | None, Query(max_length=KEYS_MAX, description="A column that is null.")] = None,
        limit: Annotated[int, Query(ge=1, le=ROWS_MAX, description="Maximum number of rows.")] = 100,
        order: Annotated[list[str] | None, Query(description='Order by this column, or "column desc".')] = None,
        after: Annotated[str | None, Query(description="`next` of the page before: continue after it.")] = None,
        columns: Annotated[str | None, Query(description="Only these columns, in this order: id,name.")] = None,
        version: Annotated[int | None, Query(ge=1, le=VERSION_MAX, description="Read this version.")] = None,
        branch: Annotated[str, Query(max_length=NAME_CHARACTERS_MAX, description="Read this branch.")] = MAIN,
    ) -> Response:
        """Rows by key (`key=7`, also several) or by values: `customer=7&kind=a&kind=b`. 404: no row with this key."""
        service.access.check(request, "read")
        if not branch.isprintable():
            raise NotFound("there is no such branch", branch=repr(branch)[:80])
        name, moment = known_form(table), Moment(version, branch=branch)
        values = _values(request, null or ())
        ask: Callable[[], FoundRows]
        if key:
            if values or order or after or columns:
                raise Invalid("give keys or values of columns, not both", advice="key= finds whole rows.")
            keys = [_key(one) for one in key]

            def ask() -> FoundRows:
                found = find_keys(lake, name, keys, moment)
                if len(keys) == 1 and found.not_found:
                    raise no_row(lake, found, moment)
                return found

        else:
            chosen = None if columns is None else [one.strip() for one in columns.split(",")]

            def ask() -> FoundRows:
                return find_values(lake, name, values, moment, limit=limit, order=order, after=after, columns=chosen)

        return answer(200, json_text(as_json(await service.workers.ask(ask))))

    app.router.add_api_route(
        "/api/tables/{table}/lookup",
        lookup,
        response_model=FoundRows,
        responses=_ERRORS,
        route_class_override=ByColumns,
    )


def _values(request: Request, nulls: Sequence[str]) -> Mapping[str, Sequence[str | None]]:
    found: dict[str, list[str | None]] = {}
    for name, value in request.query_params.multi_items():
        if name not in _OWN:
            found.setdefault(name, []).append(value)
    for name in nulls:
        found.setdefault(name, []).append(None)
    if sum(map(len, found.values())) > KEYS_MAX:
        raise Invalid("too many values", values_max=KEYS_MAX, advice="Ask for fewer at once.")
    return found


def _key(text: str) -> Sequence[str]:
    """The values of a key. Of several columns it is a JSON list; of one column, the text itself."""
    if not text.startswith("["):
        return [text]
    try:
        values = json.loads(text)
    except ValueError:
        return [text]
    plain = isinstance(values, list) and all(isinstance(one, str | int) for one in values)
    return [one if isinstance(one, str) else json.dumps(one) for one in values] if plain else [text]
