"""An OpenAI-compatible endpoint without a model: each prompt says what becomes of it. In a thread, on a free port."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


class ScriptedServer:
    """Answers `words` events, "w0 w1 …", unless the prompt names another fate (see `_fate`). bodies: what was asked;
    most: requests in flight at once."""

    def __init__(self, words: int = 5) -> None:
        self.words, self.bodies, self.most, self._now, self.url = words, [], 0, 0, ""
        self.closing = asyncio.Event()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            return await self._fate(request, body, str(body.get("prompt") or body["messages"][0]["content"]))
        finally:
            self._now -= 1

    async def _fate(self, request: web.Request, body: dict[str, object], prompt: str) -> web.StreamResponse:
        if prompt == "refuse":
            told = {"error": {"message": "queue is full", "type": "overloaded", "code": 429}}
            return web.json_response(told, status=429, headers={"Retry-After": "1"})
        if prompt == "crash":
            return web.Response(status=500, text="<html>oops</html>")
        if prompt == "hang":
            await self.closing.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        if chat:
            await self._send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for place in range(0 if prompt == "silent" else self.words):
            await asyncio.sleep(0)  # others get their turn
            text = f"w{place} "
            await self._send(response, {"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
            if prompt == "cut" and place == 1:
                return response
            if prompt == "drop" and place == 1:
                request.transport.close()
                return response
            if prompt == "fail" and place == 1:
                await self._send(response, {"error": {"message": "lost my mind", "type": "engine_error"}})
                break
        if prompt == "garbage":
            await response.write(b"data: {nonsense\n\n")
        elif prompt not in ("fail", "silent"):
            details = {"cached_tokens": 2}
            usage = {"prompt_tokens": 7, "completion_tokens": 2 * self.words, "prompt_tokens_details": details}
            await self._send(response, {"choices": [], "usage": usage})
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response

    @staticmethod
    async def _send(response: web.StreamResponse, event: dict[str, object]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@contextmanager
def scripted_server(words: int = 5) -> Iterator[ScriptedServer]:
    server, loop = ScriptedServer(words), asyncio.new_event_loop()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted"}, {"id": "other"}]})

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_post("/v1/chat/completions", server.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.closing.set)
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
