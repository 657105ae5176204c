"""The application: routes, limits, errors. docs/serving.md is their contract."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import mimetypes
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.process_collector import ProcessCollector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from tinyforge.errors import UserError
from tinyforge.files import json_value
from tinyforge.formats.generation import NOTHING, GenerationConfig
from tinyforge.hosts import REFUSED, is_allowed
from tinyforge.infer.scheduler import QueueFull
from tinyforge.infer.session import checked_ids
from tinyforge.infer.trace import attention_of, attention_ops
from tinyforge.serve.answers import Writer
from tinyforge.serve.engine import Answer, Draining, Engine, Piece
from tinyforge.serve.http import HEAD_BYTES
from tinyforge.serve.openapi import description
from tinyforge.serve.protocol import (
    OPENAI,
    ApiError,
    AttentionRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    Limits,
    TokenizeRequest,
    encode_chat,
    read,
)
from tinyforge.tokenizers.chat_templates import Template
from tinyforge.tokenizers.template_formats import jinja
from tinyforge.tokenizers.vocabulary import start_ids

PAGE = Path(__file__).parent / "page"
BODY_SECONDS = 30.0
SEND_SECONDS = 60.0
"""For a client to take a chunk; one that does not is disconnected."""
SHORT_TEXT = 2000
"""Characters; longer texts are tokenised in a thread, so that they do not block other requests."""
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
# The system's tables of these types differ, and browsers refuse a script of another type.
for suffix, kind in {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".woff2": "font/woff2",
    ".ico": "image/x-icon",
    ".webmanifest": "application/manifest+json",
}.items():
    mimetypes.add_type(kind, suffix)


class ClientGone(Exception):
    """The client has disconnected."""


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content, separators=(",", ":")), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body, error.status, error.headers)


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", "server_error", headers={"Retry-After": "5"})


def send(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return FileResponse(file, media_type=mimetypes.guess_type(file.name)[0])

    return answer


class App:
    """The server's routes around an engine. template: the model's chat template. key: the API key, "" for none. hosts:
    further names by which browsers may call it. origins: of other pages that may call it. generation: how requests that
    do not say are sampled."""

    def __init__(
        self,
        engine: Engine,
        template: Template,
        name: str,
        model: Any,
        spec: str,
        limits: Limits,
        key: str = "",
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        page: Path = PAGE,
        generation: GenerationConfig = NOTHING,
    ) -> None:
        self.engine, self.template, self.name, self.limits, self.key = engine, template, name, limits, key
        self.model, self.spec, self.tokenizer = model, spec, engine.tokenizer
        self.config = model.config
        self.context = engine.scheduler.decoder.capacity
        self.stop_ids = template.stop_ids(self.tokenizer)
        self.hosts, self.origins = hosts, set(origins)
        self.generation, self.default = generation, generation.sampling(OPENAI)
        self.created = int(time.time())
        seen = f"{spec} {self.config.to_dict()} {self.tokenizer.hash()}"
        self.fingerprint = "fp_" + hashlib.sha256(seen.encode()).hexdigest()[:12]
        self.attention = attention_ops(model)
        self._attending = False
        self.metrics = Metrics(engine)
        routes = [
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.one_model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/attention", self.attend, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/props", self.props, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]
        for file in sorted(page.rglob("*")):
            if file.is_file():
                address = "/" + file.relative_to(page).as_posix().removesuffix("index.html")
                routes.append(Route(address, send(file), methods=["GET"]))
        middleware = [Middleware(Guard, app=self)]
        if self.origins:
            middleware.insert(
                0,
                Middleware(
                    CORSMiddleware,
                    allow_origins=sorted(self.origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["authorization", "content-type"],
                ),
            )
        self.asgi = Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={HTTPException: self._http_error, ApiError: self._api_error},
        )

    @staticmethod
    async def _http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = {404: "not found", 405: f"the method {request.method[:20]} is not allowed here"}
        message = f"{said.get(error.status_code, error.detail)}; /openapi.json describes the server"
        return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))

    @staticmethod
    async def _api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    # --- every request

    def admit(self, scope: dict[str, Any]) -> None:
        """ApiError for a request that is refused before its body is read."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["path"]) > HEAD_BYTES:
            raise ApiError(
                431, f"the request's headers have more than {HEAD_BYTES} bytes", headers={"Connection": "close"}
            )
        host = headers.get(b"host", "").lower()
        if not is_allowed(host, self.hosts):
            raise ApiError(403, REFUSED)
        origin = headers.get(b"origin")
        if origin and origin not in self.origins and origin.split("://", 1)[-1].lower() != host:
            raise ApiError(403, "pages of other origins may not call this server; --cors-origin ORIGIN allows one")
        open_to_all = scope["method"] in ("GET", "HEAD") and not self._needs_key(scope["path"])
        if self.key and not open_to_all and scope["method"] != "OPTIONS":
            given = headers.get(b"authorization", "")
            given = given[7:] if given[:7].lower() == "bearer " else ""
            if not hmac.compare_digest(given.encode("latin-1"), self.key.encode()):
                raise ApiError(
                    401,
                    "wrong or no API key; send it as Authorization: Bearer KEY",
                    "authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        with suppress(ValueError):
            if int(headers.get(b"content-length", "0")) > self.limits.body:
                raise self._too_large()

    @staticmethod
    def _needs_key(path: str) -> bool:
        return path.startswith(("/v1/", "/metrics", "/props", "/tokenize", "/detokenize"))

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.limits.body} bytes, the limit of this server")

    async def _wish(self, request: Request, kind: type[Any]) -> Any:
        """Read and check a body as a request of this kind."""
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    data += part
                    if len(data) > self.limits.body:
                        raise self._too_large()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {BODY_SECONDS:g} seconds",
                "timeout_error",
                headers={"Connection": "close"},
            ) from None
        try:
            content = json_value(bytes(data))
        except UnicodeDecodeError as error:
            raise ApiError(400, f"the body is not UTF-8 at byte {error.start}") from None
        except ValueError as error:
            raise ApiError(400, f"the body cannot be read: {error}") from None
        return read(kind, content)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"there is no model {name[:100]!a}; this server has {self.name!a}",
                param="model",
                code="model_not_found",
            )

    # --- models

    def _model_entry(self) -> dict[str, Any]:
        heads = [op.heads for op in self.attention]
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "tinyforge",
            "tinyforge": {
                "model": self.spec,
                "parameters": int(self.model.buffer.count),
                "context": self.context,
                "vocab": self.config.vocab,
                "template": self.template.name,
                "chat": self.template.name != "plain",
                "system_prompt": True,
                "prediction_heads": self.model.prediction_heads,
                "most_drafts": self.engine.scheduler.most_drafts,
                "layers": len(heads),
                "heads": heads[0] if heads and len(set(heads)) == 1 else heads or 0,
                "attention": bool(heads),
                "attention_tokens": min(self.limits.attention, self.context),
                "limits": {
                    "max_tokens": self.limits.max_tokens,
                    "n": self.limits.n,
                    "top_logprobs": 20,
                    "body": self.limits.body,
                },
                "sampling": dict(self.generation.fields),
            },
        }

    async def list_models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_entry()]})

    async def one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return json_response(self._model_entry())

    async def props(self, request: Request) -> Response:
        """For llama.cpp's web client, which asks at start for the context, the sampling defaults and the template."""
        default, most = self.default, min(self.limits.max_tokens, self.default.max_tokens)
        most = most if most < self.context else -1
        texts = {i: text for text, i in self.tokenizer.specials.items()}
        bos, ends = self.tokenizer.bos, sorted(texts[i] for i in self.stop_ids if i in texts)
        return json_response(
            {
                "default_generation_settings": {
                    "n_ctx": self.context,
                    "speculative": False,
                    "is_processing": self.engine.outstanding > 0,
                    "params": {
                        "temperature": default.temperature,
                        "top_k": default.top_k,
                        "top_p": default.top_p,
                        "min_p": default.min_p,
                        "repeat_penalty": default.repetition_penalty,
                        "presence_penalty": 0.0,
                        "frequency_penalty": 0.0,
                        "n_predict": most,
                        "max_tokens": most,
                    },
                },
                "total_slots": self.engine.scheduler.rows,
                "model_path": self.name,
                "model_alias": self.name,
                "role": "model",
                "modalities": {"vision": False, "audio": False},
                "chat_template": jinja(self.template),
                "bos_token": "" if bos is None else texts[bos],
                "eos_token": ends[0] if ends else "",
                "build_info": "tinyforge",
            }
        )

    # --- texts

    async def chat(self, request: Request) -> Response:
        wish: ChatRequest = await self._wish(request, ChatRequest)
        self._check_model(wish.model)
        wish.check()
        length = sum(len(m.text(f"messages.{i}")) for i, m in enumerate(wish.messages))
        self._check_length(length, "messages")
        ids = await self._slowly(length, lambda: encode_chat(self.template, self.tokenizer, wish.messages))
        top = (wish.top_logprobs or 0) if wish.logprobs else None
        return await self._answer(request, wish, [ids], wish.tokens, top, chat=True, echo=[], param="messages")

    async def complete(self, request: Request) -> Response:
        wish: CompletionRequest = await self._wish(request, CompletionRequest)
        self._check_model(wish.model)
        wish.check()
        texts = [wish.prompt] if isinstance(wish.prompt, str) else [p for p in wish.prompt if isinstance(p, str)]
        self._check_length(max(map(len, texts), default=0), "prompt")
        prompts = await self._slowly(sum(map(len, texts)), lambda: wish.prompts(self.tokenizer))
        for ids in prompts:
            checked_ids(ids, self.config.vocab)
        tokens = 16 if wish.max_tokens is None else wish.max_tokens
        echo = []
        if wish.echo:
            echo = texts or [self.tokenizer.decode(ids) for ids in prompts]
            echo = [text for text in echo for _ in range(wish.n or 1)]
        return await self._answer(request, wish, prompts, tokens, wish.logprobs, chat=False, echo=echo, param="prompt")

    def _check_length(self, characters: int, param: str) -> None:
        """Refuse early what cannot fit: a token has at most the bytes of the longest one."""
        least = characters // max(1, int(self.tokenizer.byte_lengths.max()))
        if least >= self.context:
            raise self._too_long(f"at least {least}", param)

    def _too_long(self, tokens: str, param: str) -> ApiError:
        return ApiError(
            400,
            f"{param}: {tokens} tokens, which leave no room for a reply in this model's context of "
            f"{self.context}; shorten the text",
            param=param,
            code="context_length_exceeded",
        )

    @staticmethod
    async def _slowly(characters: int, encode: Callable[[], Any]) -> Any:
        return encode() if characters <= SHORT_TEXT else await asyncio.to_thread(encode)

    async def _answer(
        self,
        request: Request,
        wish: Generation,
        prompts: list[list[int]],
        tokens: int | None,
        top: int | None,
        chat: bool,
        echo: list[str],
        param: str,
    ) -> Response:
        extension, wanted = wish.extension, []
        for ids in prompts:
            if not ids:
                raise ApiError(400, "the prompt is empty; give at least one character", param=param)
            room = self.context - len(ids)
            if room < 1:
                raise self._too_long(str(len(ids)), param)
            inside = top is not None or extension.look_inside
            drawn = wish.sampling(room, self.limits, self.config.vocab, inside, tokens, self.default)
            wanted += [(ids, s) for s in drawn]
        most = self.engine.scheduler.rows + self.engine.scheduler.queue
        if len(wanted) > most:
            raise ApiError(400, f"{len(wanted)} texts requested, this server takes at most {most}", param="n")
        alternatives = max(top or 0, extension.top + 1 if extension.look_inside else 0)
        seconds = min(self.limits.seconds, wish.timeout or math.inf)
        try:
            stop_ids = frozenset[int]() if wish.ignore_eos else self.stop_ids
            answer = self.engine.submit(wanted, stop_ids, wish.stops, alternatives, time.monotonic() + seconds)
        except QueueFull:
            self.metrics.refused.inc()
            raise ApiError(
                429,
                "the server is busy; try again later",
                "rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            ) from None
        except Draining:
            raise shutting_down() from None
        writer = Writer(
            self.tokenizer,
            self.name,
            self.fingerprint,
            chat,
            top,
            extension,
            prompts,
            echo,
            timings=bool(wish.timings_per_token),
        )
        if wish.stream:
            usage = wish.stream_options is not None and wish.stream_options.include_usage
            return EventStream(self, answer, writer, usage)
        return await self._whole(request, answer, writer)

    async def _whole(self, request: Request, answer: Answer, writer: Writer) -> Response:
        pieces: list[list[Piece]] = [[] for _ in answer.choices]
        try:
            async for news in self.updates(answer, request.receive):
                for index, piece, _ in news:
                    if piece is not None:
                        pieces[index].append(piece)
        except ClientGone:
            return Response(status_code=499)
        finally:
            self.engine.cancel(answer)
        return json_response(writer.body(answer, list(map(Piece.joined, pieces))))

    async def updates(
        self, answer: Answer, receive: Callable[[], Awaitable[Any]]
    ) -> AsyncGenerator[list[tuple[int, Piece | None, str | None]]]:
        """Yield (choice, new piece, why it ended) for the choices with news, until all have ended. ClientGone, and
        ApiError if one fails."""
        gone = asyncio.ensure_future(_disconnected(receive))
        gone.add_done_callback(lambda _: answer.news.set())
        left = dict(enumerate(answer.choices))
        try:
            while left:
                await answer.news.wait()
                answer.news.clear()
                if gone.done():
                    raise ClientGone
                news, failed = [], None
                for index, choice in list(left.items()):
                    reason = choice.reason  # read before the pieces: none come after the end
                    piece = choice.taken()
                    if piece is not None and choice.request.first_token is not None and index not in answer.started:
                        answer.started.add(index)
                        self.metrics.first.observe(choice.request.first_token - choice.request.submitted)
                    if reason in ("stop", "length") or piece is not None:
                        news.append((index, piece, reason if reason in ("stop", "length") else None))
                    if reason is not None:
                        del left[index]
                    if reason not in (None, "stop", "length"):
                        failed = self._failed(reason)
                if news:
                    yield news
                if failed is not None:
                    raise failed
        finally:
            gone.cancel()

    def _failed(self, reason: str | None) -> ApiError:
        if reason == "deadline":
            return ApiError(
                504,
                "the text was not ready in time; ask for fewer tokens, or a longer timeout",
                "timeout_error",
                code="timeout",
            )
        if reason == "error":
            return ApiError(500, "the server failed to compute this; its log says why", "server_error")
        return shutting_down()

    # --- tokens and attention

    async def tokenize(self, request: Request) -> Response:
        wish: TokenizeRequest = await self._wish(request, TokenizeRequest)
        ids = await self._slowly(len(wish.content), lambda: self.tokenizer.encode(wish.content))
        if wish.add_special:
            ids = [*start_ids(self.tokenizer), *ids]
        if not wish.with_pieces:
            return json_response({"tokens": ids})
        pieces = [{"id": i, "piece": self.tokenizer.token_bytes(i).decode("utf-8", "replace")} for i in ids]
        return json_response({"tokens": pieces})

    async def detokenize(self, request: Request) -> Response:
        wish: DetokenizeRequest = await self._wish(request, DetokenizeRequest)
        checked_ids(wish.tokens, self.config.vocab)
        return json_response({"content": self.tokenizer.decode(wish.tokens)})

    async def attend(self, request: Request) -> Response:
        wish: AttentionRequest = await self._wish(request, AttentionRequest)
        self._check_model(wish.model)
        ops, most = self.attention, min(self.limits.attention, self.context)
        if not ops:
            raise ApiError(400, "this model has no attention to show", code="no_attention")
        if sum(given is not None for given in (wish.text, wish.ids, wish.messages)) != 1:
            raise ApiError(400, "give one of text, ids and messages")
        if not wish.layer < len(ops):
            raise ApiError(400, f"layer {wish.layer}, the model has 0 to {len(ops) - 1}", param="layer")
        if not wish.head < ops[wish.layer].heads:
            last = ops[wish.layer].heads - 1
            raise ApiError(400, f"head {wish.head}, layer {wish.layer} has 0 to {last}", param="head")
        ids = wish.ids
        if ids is None:
            texts = [wish.text or ""] if wish.messages is None else [m.text("messages") for m in wish.messages]
            self._check_length(sum(map(len, texts)), "text")
            ids = await self._slowly(sum(map(len, texts)), lambda: self._ids_of(wish))
        checked_ids(ids, self.config.vocab)
        if not 1 <= len(ids) <= most:
            raise ApiError(
                400,
                f"the text has {len(ids)} tokens, attention is shown for 1 to {most}",
                code="context_length_exceeded" if ids else None,
            )
        if self.engine.draining:
            raise shutting_down()
        if self._attending:
            raise ApiError(
                429,
                "attention is being computed for another request; try again",
                "rate_limit_error",
                headers={"Retry-After": "1"},
            )
        self._attending = True
        try:
            weights = await self.engine.call(lambda: attention_of(self.model, ids, wish.layer)[wish.head])
        finally:
            self._attending = False
        tokens = [{"id": i, "text": self.tokenizer.token_bytes(i).decode("utf-8", "replace")} for i in ids]
        return json_response(
            {
                "object": "attention",
                "model": self.name,
                "layer": wish.layer,
                "head": wish.head,
                "layers": len(ops),
                "heads": ops[wish.layer].heads,
                "causal": bool(ops[wish.layer].causal),
                "tokens": tokens,
                "weights": weights.round(4).tolist(),
            }
        )

    def _ids_of(self, wish: AttentionRequest) -> list[int]:
        if wish.messages is not None:
            return encode_chat(self.template, self.tokenizer, wish.messages, reply_to_come=False)
        return [*start_ids(self.tokenizer), *self.tokenizer.encode(wish.text or "")]

    # --- the server itself

    async def health(self, request: Request) -> Response:
        if self.engine.draining:
            return json_response({"status": "draining"}, 503)
        return json_response({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        return json_response(description(self.name, bool(self.key)))


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streamed answer: server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, app: App, answer: Answer, writer: Writer, usage: bool) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.app, self.answer, self.writer, self.usage = app, answer, writer, usage

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def out(body: bytes, more: bool = True) -> None:
            async with asyncio.timeout(SEND_SECONDS):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        updates = self.app.updates(self.answer, receive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await out(b"".join(self.writer.opening(i) for i in range(len(self.answer.choices))))
            left = len(self.answer.choices)
            async for news in updates:
                events = b"".join(self.writer.chunk(i, piece, why, self.answer.choices[i]) for i, piece, why in news)
                left -= sum(why is not None for _, _, why in news)
                if not left:
                    events += (self.writer.usage_chunk(self.answer) if self.usage else b"") + b"data: [DONE]\n\n"
                if events:
                    await out(events, more=bool(left))
        except ApiError as error:
            await out(b"data: " + json.dumps(error.body).encode() + b"\n\n", more=False)
        except (ClientGone, TimeoutError, ClientDisconnect):
            raise ClientGone from None
        finally:
            await updates.aclose()
            self.app.engine.cancel(self.answer)


class Guard:
    """The outermost layer: admission, headers of all answers, metrics, and bugs told without their tracebacks."""

    def __init__(self, asgi: Any, app: App) -> None:
        self.asgi, self.app = asgi, app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        started, status = time.monotonic(), 0

        async def guarded(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        try:
            self.app.admit(scope)
            await self.asgi(scope, receive, guarded)
        except ApiError as error:
            await error_response(error)(scope, receive, guarded)
        except UserError as error:
            await error_response(ApiError(400, str(error)))(scope, receive, guarded)
        except (ClientGone, ClientDisconnect):
            # Nobody reads the rest. uvicorn closes the connection of an incomplete answer.
            status = status or 499
        except Exception:
            traceback.print_exc()
            if not status:
                body = ApiError(500, "the server failed; its log says why", "server_error")
                await error_response(body)(scope, receive, guarded)
            else:
                raise
        finally:
            path = scope["path"] if scope["path"] in KNOWN_PATHS else "other"
            self.app.metrics.requests.labels(path, str(status)).inc()
            self.app.metrics.seconds.labels(path).observe(time.monotonic() - started)


KNOWN_PATHS = frozenset(
    [
        "/",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/attention",
        "/tokenize",
        "/detokenize",
        "/props",
        "/health",
        "/metrics",
        "/openapi.json",
    ]
)


class Metrics:
    """The metrics for Prometheus."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tinyforge_requests", "Answers by path and status", ["path", "status"], registry=self.registry
        )
        self.refused = Counter(
            "tinyforge_refused", "Requests refused because the queue was full", registry=self.registry
        )
        buckets = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
        self.first = Histogram(
            "tinyforge_first_token_seconds",
            "From a request to its first token",
            buckets=buckets,
            registry=self.registry,
        )
        self.seconds = Histogram(
            "tinyforge_request_seconds",
            "From a request to the end of its answer",
            ["path"],
            buckets=buckets,
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def collect(self) -> Any:
        engine, scheduler = self.engine, self.engine.scheduler
        gauges = {
            "rows": ("Rows of the batch", scheduler.rows),
            "rows_busy": ("Rows in use", scheduler.rows - len(scheduler.free)),
            "waiting": ("Texts waiting for a row", len(scheduler.waiting)),
            "outstanding": ("Texts not finished", engine.outstanding),
            "prefix_bytes": ("Bytes of cached beginnings of prompts", scheduler.prefixes.bytes),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"tinyforge_{name}", what, value=value)
        counters = {
            "generated_tokens": ("Tokens generated", engine.generated),
            "steps": ("Steps of the scheduler", engine.steps),
            "prompt_tokens_computed": ("Prompt tokens computed", engine.prefilled),
            "prompt_tokens_cached": ("Prompt tokens found in the cache", engine.reused),
        }
        for name, (what, value) in counters.items():
            yield CounterMetricFamily(f"tinyforge_{name}", what, value=value)
        ended = CounterMetricFamily("tinyforge_texts", "Texts that have ended, by reason", labels=["reason"])
        for reason, count in sorted(engine.ended.items()):
            ended.add_metric([reason], count)
        yield ended
