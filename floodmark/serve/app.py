"""The app of one lake: takes rows, each once, and reports its state and changes. Answered rows are durable (I4)."""

from __future__ import annotations

from fastapi import FastAPI

import floodmark
from floodmark.serve.http.api import add_questions
from floodmark.serve.http.edge import Guarded, HttpEdge, handle_errors
from floodmark.serve.http.events import add_events
from floodmark.serve.http.lookup import add_lookup
from floodmark.serve.http.metrics import add_metrics
from floodmark.serve.http.openapi import describe
from floodmark.serve.http.rows import add_rows
from floodmark.serve.http.service import Service
from floodmark.serve.page.handlers import add_page


def create_app(service: Service) -> FastAPI:
    """The app of one lake that is open for writing."""
    app = FastAPI(
        title="Floodmark", version=floodmark.__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.router.route_class = Guarded
    app.state.workers = service.workers
    add_rows(app, service)
    add_questions(app, service)
    add_lookup(app, service)
    add_events(app, service)
    add_metrics(app, service)
    add_page(app, service)
    handle_errors(app)
    app.add_middleware(HttpEdge, access=service.access)
    describe(app)
    return app
