"""The application: all routes, and what every request passes on its way in (its body's size and time, its key)."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response

from modelworks import __version__
from modelworks.serve.api.chat import chat_routes
from modelworks.serve.api.completions import completion_routes
from modelworks.serve.api.errors import ApiError, install_error_handlers
from modelworks.serve.api.gate import ApiKeyGate, BodyLimit
from modelworks.serve.api.schemas import AbortBody
from modelworks.serve.api.service import Service
from modelworks.serve.api.tokens import token_routes

_PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(service: Service) -> FastAPI:
    """The ASGI application of `service`. Its schema is at /openapi.json; no page loads anything from elsewhere."""
    app = FastAPI(title="Modelworks", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    install_error_handlers(app)
    for routes in (completion_routes, chat_routes, token_routes):
        app.include_router(routes(service))
    _add_models(app, service)
    _add_operations(app, service)
    options = service.options
    app.add_middleware(ApiKeyGate, api_key=options.api_key)
    app.add_middleware(BodyLimit, limit=options.body_limit, timeout=options.client_timeout)  # the outermost: added last
    return app


def _add_models(app: FastAPI, service: Service) -> None:
    model = service.model
    shown = {"id": model.name, "object": "model", "created": model.created, "owned_by": "modelworks"}
    shown |= {"max_model_len": model.max_model_len}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [shown]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != model.name:
            raise ApiError(404, f"no model of this name; the model is `{model.name}`", code="model_not_found")
        return shown


def _add_operations(app: FastAPI, service: Service) -> None:
    page = files("modelworks.serve.api").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY})

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether the engine is alive: it runs and has said something lately."""
        found = service.engine.health()
        told: dict[str, Any] = {"status": "ok" if service.alive else "unhealthy", "engine": found.state}
        told |= {"silent_seconds": round(found.silent_for, 3), "restarts": found.n_restarts, "error": found.error}
        return JSONResponse(told, 200 if service.alive else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether new requests are taken."""
        told = {"ready": service.ready, "draining": service.draining}
        return JSONResponse(told, 200 if service.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=_METRICS_TYPE)

    @app.post("/abort")
    async def abort(body: AbortBody) -> dict[str, Any]:
        """End a request by the id that its response has. One that has ended, or never was, is no error."""
        return {"request_id": body.request_id, "aborted": service.engine.abort(body.request_id)}
