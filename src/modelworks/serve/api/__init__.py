"""The server's front: an OpenAI-compatible API over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.serve.api.app import build_app as build_app
    from modelworks.serve.api.options import ServerOptions as ServerOptions
    from modelworks.serve.api.server import Server as Server
    from modelworks.serve.api.server import bind as bind
    from modelworks.serve.api.server import connections_allowed as connections_allowed
    from modelworks.serve.api.server import serve as serve
    from modelworks.serve.api.server import url_of as url_of
    from modelworks.serve.api.service import Service as Service

_HOME = {
    "Server": "server",
    "ServerOptions": "options",
    "Service": "service",
    "bind": "server",
    "build_app": "app",
    "connections_allowed": "server",
    "serve": "server",
    "url_of": "server",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)
