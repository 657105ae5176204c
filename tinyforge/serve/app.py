"""The application: routes, limits, errors. docs/serving.md is their contract."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import math
import mimetypes
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
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
from tinyforge.infer.embeddings import embeddings, is_encoder
from tinyforge.infer.grammar import After, Constraint, Grammars
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.scheduler import QueueFull
from tinyforge.infer.session import checked_ids
from tinyforge.infer.trace import attention_of, attention_ops
from tinyforge.serve import protocol
from tinyforge.serve.answers import Place, Writer
from tinyforge.serve.engine import Answer, Draining, Engine, Piece
from tinyforge.serve.http import HEAD_BYTES
from tinyforge.serve.messages import CountRequest, MessagesRequest, MessageWriter
from tinyforge.serve.openapi import description
from tinyforge.serve.protocol import ApiError, Generation, Limits
from tinyforge.serve.responses import Conversations, ResponsesRequest, ResponseWriter
from tinyforge.serve.routes import ENDPOINTS, Endpoint
from tinyforge.serve.tools import IGNORED, Tools, grammar, select
from tinyforge.tokenizers import thoughts
from tinyforge.tokenizers.chat_templates import AnyTemplate, ChatTemplate
from tinyforge.tokenizers.template_formats import jinja
from tinyforge.tokenizers.tool_calls import learn
from tinyforge.tokenizers.vocabulary import start_ids, texts_by_id
from tinyforge.tokenizers.wordpiece import CLS, SEP

LABELS = {"/", *(e.path for e in ENDPOINTS)}
"""Paths that the metrics count apart; all others are "other"."""
PAGE = Path(__file__).parent / "page"
BODY_SECONDS = 30.0
SEND_SECONDS = 60.0
"""For a client to take a chunk; one that does not is disconnected."""
SHORT_TEXT = 2000
"""Characters, tokens or bytes; what is longer is read, tokenised and written in a thread, so that it does not block
other requests."""
LONG_TEXT = 1 << 15
"""Characters and ids that /tokenize and /detokenize take of any model; 4 times the context where that is more."""
MOST_PENDING, MOST_UNREAD = 64, 64 << 20
"""Calls in threads under way, and bytes of all bodies that are being received; beyond them requests are refused."""
MOST_ANSWER = 64 << 20
TOKEN_BYTES, LOGPROB_BYTES, FLOAT_BYTES = 16, 64, 22
"""Bytes of an answer, at most; and of a token, a log-probability and a number in it, about."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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


def busy(message: str = "the server is busy; try again later", code: str | None = "queue_full") -> ApiError:
    return ApiError(429, message, "rate_limit_error", code=code, headers={"Retry-After": "1"})


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", "server_error", headers={"Retry-After": "5"})


def send(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        return FileResponse(file, media_type=mimetypes.guess_type(file.name)[0])

    return answer


class App:
    """The server's routes around an engine. template: the model's chat template. key: the API key, "" for none. hosts:
    further names by which browsers may call it. origins: of other pages that may call it. generation: how requests that
    do not say are sampled. first: of `embeddings`. separate_thoughts: whether a reply's thoughts are told apart where a
    request does not say."""

    def __init__(
        self,
        engine: Engine,
        template: AnyTemplate,
        name: str,
        model: Any,
        spec: str,
        limits: Limits,
        key: str = "",
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        page: Path = PAGE,
        generation: GenerationConfig = NOTHING,
        first: bool = False,
        separate_thoughts: bool = True,
    ) -> None:
        self.engine, self.template, self.name, self.limits, self.key = engine, template, name, limits, key
        self.model, self.spec, self.tokenizer = model, spec, engine.tokenizer
        self.config = model.config
        self.context = engine.scheduler.decoder.capacity
        self.stop_ids = template.stop_ids(self.tokenizer)
        self.call_form = learn(template, self.tokenizer)
        self.thoughts = thoughts.learn(template, self.tokenizer)
        self.separate_thoughts = separate_thoughts
        self.hosts, self.origins = hosts, set(origins)
        self.generation, self.default = generation, generation.sampling(protocol.OPENAI)
        self.created = int(time.time())
        seen = f"{spec} {self.config.to_dict()} {self.tokenizer.hash()}"
        self.fingerprint = "fp_" + hashlib.sha256(seen.encode()).hexdigest()[:12]
        self.encodes, self.first = is_encoder(model), first
        self.attention = [] if self.encodes else attention_ops(model)
        self.longest = max(LONG_TEXT, 4 * self.context)
        self._pending = self._unread = 0
        self._description: Response | None = None
        self._grammars: Grammars | None = None
        self.conversations = Conversations()
        self.metrics = Metrics(engine)
        routes = [Route(e.path, self._handler(e), methods=[e.method]) for e in ENDPOINTS]
        files = {
            "/" + file.relative_to(page).as_posix().removesuffix("index.html"): file
            for file in sorted(page.rglob("*"))
            if file.is_file()
        }
        routes += [Route(address, send(file), methods=["GET"]) for address, file in files.items()]
        self.public = {e.path for e in ENDPOINTS if e.public} | set(files)
        middleware = [Middleware(Guard, app=self)]
        if self.origins:
            middleware.insert(
                0,
                Middleware(
                    CORSMiddleware,
                    allow_origins=sorted(self.origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],  # OpenAI's client for browsers sends a dozen of its own
                    allow_private_network=True,
                    expose_headers=["retry-after", *IGNORED],
                ),
            )
        self.asgi = Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={HTTPException: self._http_error, ApiError: self._api_error},
        )

    def _handler(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """What answers a request to an endpoint; the handler of one with a body is called with that too."""
        handler, body = getattr(self, endpoint.handler), endpoint.body
        if body is None:
            return handler

        async def answer(request: Request) -> Response:
            wish = await self._parse_body(request, body)
            self._check_model(getattr(wish, "model", None))
            response: Response = await handler(request, wish)
            return response

        return answer

    @staticmethod
    async def _http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = {404: "not found", 405: f"the method {request.method[:20]} is not allowed here"}
        message = f"{said.get(error.status_code, error.detail)}; /openapi.json describes the server"
        return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))

    @staticmethod
    async def _api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if request.url.path.startswith("/v1/messages"):
            error.body = {"type": "error", **error.body}
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
        if origin and self.origins.isdisjoint((origin, "*")) and origin.split("://", 1)[-1].lower() != host:
            raise ApiError(403, "pages of other origins may not call this server; --cors-origin ORIGIN allows one")
        public = scope["method"] in ("GET", "HEAD") and scope["path"] in self.public
        if self.key and not public and scope["method"] != "OPTIONS":
            given = headers.get(b"authorization", "")
            given = given[7:] if given[:7].lower() == "bearer " else headers.get(b"x-api-key", "")
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
        if b"transfer-encoding" in headers and (b"content-length" in headers or scope.get("http_version") == "1.0"):
            raise ApiError(
                400, "Transfer-Encoding next to Content-Length, or in HTTP/1.0", headers={"Connection": "close"}
            )
        if headers.get(b"content-encoding", "identity").strip().lower() != "identity":
            raise ApiError(415, "the body has a Content-Encoding; send it as it is", param=None)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.limits.body} bytes, the limit of this server")

    async def _parse_body(self, request: Request, kind: type[Any]) -> Any:
        """Read and check a body as a request of this kind."""
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    data += part
                    self._unread += len(part)
                    if len(data) > self.limits.body:
                        raise self._too_large()
                    if self._unread > max(MOST_UNREAD, 2 * self.limits.body):
                        raise busy("too many bodies are being received; try again later", None)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {BODY_SECONDS:g} seconds",
                "timeout_error",
                headers={"Connection": "close"},
            ) from None
        finally:
            self._unread -= len(data)

        def parse() -> Any:
            if data.count(b",") > 4 * self.longest:  # reading half a million numbers holds up all threads
                raise ApiError(400, f"the body has more than {4 * self.longest} values; send less at a time")
            try:
                content = json_value(bytes(data))
            except UnicodeDecodeError as error:
                raise ApiError(400, f"the body is not UTF-8 at byte {error.start}") from None
            except ValueError as error:
                raise ApiError(400, f"the body cannot be read: {error}") from None
            return protocol.read(kind, content, self.longest)

        return await self._slowly(len(data), parse)

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
                "prediction_heads": getattr(self.model, "prediction_heads", 0),
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
        bos, texts = self.tokenizer.bos, texts_by_id(self.tokenizer)
        ends = sorted(texts[i] for i in self.stop_ids if i in texts)
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
                "chat_template": self.template.source()
                if isinstance(self.template, ChatTemplate)
                else jinja(self.template),
                "bos_token": "" if bos is None else texts[bos],
                "eos_token": ends[0] if ends else "",
                "build_info": "tinyforge",
            }
        )

    # --- texts

    async def chat(self, request: Request, wish: protocol.ChatRequest) -> Response:
        if wish.extension.score:
            return await self._score_reply(request, wish)
        tools, ids = await self._read_chat(wish)
        top = (wish.top_logprobs or 0) if wish.logprobs else None
        writer = self._writer(wish, [ids], top, tools)
        return await self._answer(request, wish, [ids], wish.tokens, top, "messages", writer, tools)

    async def _read_chat(self, wish: protocol.ChatRequest) -> tuple[Tools, list[int]]:
        """The tools of a chat, and its ids."""
        tools = self._tools_of(wish)
        ids = await self._chat_ids(wish, tools)
        return self._with_thoughts(tools, wish, ids), ids

    def _tools_of(self, wish: protocol.ChatRequest) -> Tools:
        wish.check()
        return select(wish.tools, wish.tool_choice, wish.parallel_tool_calls, self.call_form)

    def _check_generates(self) -> None:
        if self.encodes:
            raise ApiError(400, "this model gives vectors and no text; send it to /v1/embeddings", code="no_text")

    async def _chat_ids(self, wish: protocol.ChatRequest, tools: Tools, reply_to_come: bool = True) -> list[int]:
        self._check_generates()
        length = sum(m.length(f"messages.{i}") for i, m in enumerate(wish.messages))
        self._check_length(length, "messages")
        length += 100 * len(wish.messages) + 1000 * len(tools.shown)

        def encoded() -> list[int]:
            variables = wish.chat_template_kwargs
            return protocol.encode_chat(
                self.template, self.tokenizer, wish.messages, reply_to_come, variables, tools.shown, self.call_form
            )

        ids: list[int] = await self._slowly(length, encoded)
        return ids

    def _with_thoughts(self, tools: Tools, wish: protocol.ChatRequest, ids: Sequence[int]) -> Tools:
        """How the reply to a prompt is read, thoughts included."""
        tags = self.thoughts
        asked = wish.reasoning_format or ("auto" if self.separate_thoughts else "none")
        if tags is None or asked == "none":
            return tools
        end = b"".join(map(self.tokenizer.token_bytes, ids[-2 * len(tags.open) :])).decode("utf-8", "replace")
        return replace(tools, thoughts=tags, begun=tags.begun(end))

    async def _score_reply(self, request: Request, wish: protocol.ChatRequest) -> Response:
        """The last message as the tokens that the model reads, each with what the model expected in its place."""
        tools, reply = self._tools_of(wish), wish.messages[-1].text("messages")
        before = await self._chat_ids(wish.model_copy(update={"messages": wish.messages[:-1]}), tools)
        ids = await self._chat_ids(wish, tools, reply_to_come=False)
        first = max(1, next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before)))
        end, left = first, len(reply.encode())
        while end < len(ids) and left > 0 and ids[end] not in self.stop_ids:
            left -= len(self.tokenizer.token_bytes(ids[end]))
            end += 1
        inside = wish.extension.model_copy(update={"look_inside": True, "drafts": 0})
        scored = wish.model_copy(update={"tinyforge": inside, "n": 1})
        writer = self._writer(scored, [ids[:end]], None, first_token=first)
        return await self._answer(
            request, scored, [ids[:end]], 0, None, "messages", writer, tools, [reply], places=[Place(0)]
        )

    async def respond(self, request: Request, wish: ResponsesRequest) -> Response:
        messages = wish.messages(self.conversations.get(wish.previous_response_id))
        chat = wish.chat(messages)
        tools, ids = await self._read_chat(chat)

        def keep(name: str, reply: dict[str, Any]) -> None:
            self.conversations.put(name, [*messages, reply])

        writer = ResponseWriter(self._writer(chat, [ids], wish.top), wish, self.name, keep, tools)
        return await self._answer(request, chat, [ids], chat.tokens, wish.top, "input", writer, tools)

    async def message(self, request: Request, wish: MessagesRequest) -> Response:
        chat = wish.request()
        tools, ids = await self._read_chat(chat)
        writer = MessageWriter(self._writer(chat, [ids], None), self.name, tools)
        return await self._answer(request, chat, [ids], chat.tokens, None, "messages", writer, tools)

    async def count_message(self, request: Request, wish: CountRequest) -> Response:
        _, ids = await self._read_chat(wish.chat())
        return json_response({"input_tokens": len(ids)})

    async def embed(self, request: Request, wish: protocol.EmbeddingRequest) -> Response:
        texts, each = await self._prompts(wish.input, "input", protocol.MOST_INPUTS)
        if self.encodes and texts:
            ends = [self.tokenizer.specials[text] for text in (CLS, SEP)]
            each = [[ends[0], *ids, ends[1]] if ids else [] for ids in each]
        for ids in each:
            if not 1 <= len(ids) <= self.context:
                raise ApiError(
                    400,
                    f"input: {len(ids)} tokens, expected 1 to {self.context}",
                    param="input",
                    code="context_length_exceeded" if ids else None,
                )
        vectors = await self._background(
            request, embeddings(self.model, each, self.first, self.engine.scheduler.decoder)
        )
        if wish.dimensions not in (None, size := vectors.shape[1]):
            raise ApiError(400, f"dimensions is {wish.dimensions}, this model has {size}", param="dimensions")
        if wish.encoding_format == "float" and FLOAT_BYTES * vectors.size > MOST_ANSWER:
            raise ApiError(400, f"{len(each)} vectors of {size} numbers are too many; ask for base64", param="input")
        return await self._slowly(vectors.size, lambda: self._embedding_body(wish, each, vectors))

    def _embedding_body(self, wish: protocol.EmbeddingRequest, each: Sequence[Sequence[int]], vectors: Any) -> Response:
        def shown(vector: Any) -> Any:
            if wish.encoding_format == "float":
                return vector.tolist()
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()

        count = sum(map(len, each))
        data = [{"object": "embedding", "index": i, "embedding": shown(v)} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_response({"object": "list", "data": data, "model": self.name, "usage": usage})

    async def complete(self, request: Request, wish: protocol.CompletionRequest) -> Response:
        self._check_generates()
        wish.check()
        texts, prompts = await self._prompts(wish.prompt, "prompt", protocol.MOST_PROMPTS)
        tokens, echo, places = 16 if wish.max_tokens is None else wish.max_tokens, [], []
        if wish.echo:
            size = sum(map(len, prompts))
            echo, places = await self._slowly(size, lambda: self._echo(wish, texts, prompts))
        writer = self._writer(wish, prompts, wish.logprobs, chat=False, echo=[] if places else echo, places=places)
        return await self._answer(
            request, wish, prompts, tokens, wish.logprobs, "prompt", writer, echo=echo, places=places
        )

    def _echo(
        self, wish: protocol.CompletionRequest, texts: Sequence[str], prompts: Sequence[Sequence[int]]
    ) -> tuple[list[str], list[Place]]:
        """The beginning of each text, and with log-probabilities where its tokens begin."""
        echo, n = list(texts) or [self.tokenizer.decode(ids) for ids in prompts], wish.n or 1
        places, bare = [], len(start_ids(self.tokenizer)) if texts else 0
        for text, ids in zip(echo, prompts, strict=True):
            if wish.logprobs is not None:
                shown = b"".join(map(self.tokenizer.token_bytes, ids[bare:])).decode("utf-8", "replace")
                places += [Place(min(0, len(text) - len(shown)), bare) for _ in range(n)]
        return [text for text in echo for _ in range(n)], places

    async def _prompts(self, given: Any, param: str, most: int) -> tuple[list[str], list[list[int]]]:
        """The prompts that are given as text, and the ids of each."""
        each = given if isinstance(given, list) else [given]
        texts = each if each and isinstance(each[0], str) else []
        self._check_length(max(map(len, texts), default=0), param)
        size = len(each) if each and isinstance(each[0], int) else sum(map(len, each))

        def encoded() -> list[list[int]]:
            prompts = protocol.prompt_ids(given, self.tokenizer, param, most)
            return [checked_ids(ids, self.config.vocab) for ids in prompts]

        return texts, await self._slowly(size, encoded)

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

    async def _slowly(self, size: int, work: Callable[[], Any]) -> Any:
        """What `work` returns; called in a thread where the size says that it takes long."""
        if size <= SHORT_TEXT:
            return work()
        if self._pending >= MOST_PENDING:
            raise busy()
        self._pending += 1
        try:
            return await asyncio.to_thread(work)
        finally:
            self._pending -= 1

    def _writer(
        self, wish: Generation, prompts: list[list[int]], top: int | None, tools: Tools | None = None, **more: Any
    ) -> Writer:
        """The writer of a request's answer, which is a chat's where `more` does not say otherwise."""
        return Writer(
            *(self.tokenizer, self.name, self.fingerprint),
            extension=wish.extension,
            prompts=prompts,
            top=top,
            **{"chat": True, **more},
            timings=bool(wish.timings_per_token),
            usage=bool(wish.stream and wish.stream_options and wish.stream_options.include_usage),
            prompt_top=wish.prompt_logprobs,
            tools=tools,
        )

    async def _answer(
        self,
        request: Request,
        wish: Generation,
        prompts: list[list[int]],
        tokens: int | None,
        top: int | None,
        param: str,
        writer: Writer | MessageWriter | ResponseWriter,
        tools: Tools = Tools(),  # noqa: B008
        echo: Sequence[str] = (),
        places: Sequence[Place] = (),
    ) -> Response:
        extension, scored = wish.extension, wish.prompt_logprobs is not None or bool(places)
        inside = top is not None or extension.look_inside or scored
        alternatives = max(top or 0, wish.prompt_logprobs or 0, extension.top + 1 if extension.look_inside else 0)
        constraint = await self._constraint(wish, tools)
        if constraint is not None and tools.thoughts is not None and tools.begun:
            mark = tools.thoughts.close.encode()
            constraint = After(constraint, mark, self.tokenizer.token_bytes, sorted(self.stop_ids))
        expected = self._samplings(wish, prompts, tokens, inside, param)
        self._check_share(expected, tokens, alternatives + inside)
        seconds = min(self.limits.seconds, wish.timeout or math.inf)
        ends = frozenset[int]() if wish.ignore_eos and constraint is None else self.stop_ids
        try:
            answer = self.engine.submit(
                expected,
                ends.union(wish.stop_token_ids or ()),
                wish.stops,
                alternatives,
                time.monotonic() + seconds,
                echo=echo if places else None,
                constraint=constraint,
                score=scored,
                generate=tokens != 0,
                reuse=wish.cache_prompt is not False,
            )
        except QueueFull:
            self.metrics.refused.inc()
            raise busy() from None
        except Draining:
            raise shutting_down() from None
        if wish.stream:
            return EventStream(self, answer, writer, tools.headers)
        response = await self._whole(request, answer, writer)
        response.headers.update(tools.headers)
        return response

    async def _constraint(self, wish: Generation, tools: Tools) -> Constraint | None:
        """The grammar of a request. It is compiled in a thread, as a large one takes a second."""
        given = wish.constraint()
        called = tools.form is not None and (tools.is_constrained or given is not None)
        if given is None and not called:
            return None
        name, kind, text = given or ("tools", "lark", "")
        if called and kind not in ("json_schema", "lark"):
            raise ApiError(400, f"{name} and tools both constrain the text; give one", param=name)

        def compiled() -> Constraint:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.stop_ids, self.config.vocab)
            try:
                if called:
                    schema = json_value(text) if text else None
                    return self._grammars.compile("lark", grammar(tools, self.tokenizer, schema))
                return self._grammars.compile(kind, text)
            except UserError as error:
                raise ApiError(400, f"{name}: {error}", param=name) from None

        found: Constraint = await self._slowly(SHORT_TEXT + 1, compiled)
        return found

    def _samplings(
        self, wish: Generation, prompts: list[list[int]], tokens: int | None, logprobs: bool, param: str
    ) -> list[tuple[list[int], Sampling]]:
        """Each text's prompt and how it is sampled."""
        expected = []
        for ids in prompts:
            if not ids:
                raise ApiError(400, "the prompt is empty; give at least one character", param=param)
            room = self.context - len(ids)
            if room < (tokens != 0):
                raise self._too_long(str(len(ids)), param)
            drawn = wish.sampling(room, self.limits, self.config.vocab, logprobs, tokens, self.default)
            expected += [(ids, s) for s in drawn]
        return expected

    def _check_share(
        self, expected: Sequence[tuple[Sequence[int], Sampling]], tokens: int | None, logprobs: int
    ) -> None:
        """ApiError for a request that would take more than one request may of the queue or of memory."""
        most = max(1, self.engine.most // 2)
        if len(expected) > most:
            raise ApiError(
                400, f"{len(expected)} texts requested, a request may have {most} here; send several", param="n"
            )
        count = sum((len(ids) if logprobs else 0) + (tokens != 0) * s.max_tokens for ids, s in expected)
        size = count * (TOKEN_BYTES + LOGPROB_BYTES * logprobs)
        if size > MOST_ANSWER:
            raise ApiError(
                400,
                f"the answer may take {size >> 20} MiB ({len(expected)} texts, {count} tokens), at most "
                f"{MOST_ANSWER >> 20} MiB here; ask for fewer texts, tokens or log-probabilities",
                param="max_tokens",
            )

    async def _whole(self, request: Request, answer: Answer, writer: Any) -> Response:
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
        whole = list(map(Piece.joined, pieces))
        size = sum(len(piece.text) + len(piece.tokens) * (1 + writer.top_count) for piece in whole)
        return await self._slowly(size, lambda: json_response(writer.body(answer, whole)))

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
        if reason == "grammar":
            return ApiError(400, "the grammar or schema became too complex for this text; simplify it")
        if reason == "error":
            return ApiError(500, "the server failed to compute this; its log says why", "server_error")
        return shutting_down()

    # --- tokens and attention

    async def tokenize(self, request: Request, wish: protocol.TokenizeRequest) -> Response:
        if len(wish.content) > self.longest:
            message = f"content has {len(wish.content)} characters, at most {self.longest} here; send it in parts"
            raise ApiError(400, message, param="content")
        ids = await self._slowly(len(wish.content), lambda: self.tokenizer.encode(wish.content))
        if wish.add_special:
            ids = [*start_ids(self.tokenizer), *ids]
        if not wish.with_pieces:
            return json_response({"tokens": ids})
        return await self._slowly(8 * len(ids), lambda: json_response({"tokens": [self._piece(i) for i in ids]}))

    def _piece(self, token: int) -> dict[str, Any]:
        return {"id": token, "piece": self.tokenizer.token_bytes(token).decode("utf-8", "replace")}

    async def detokenize(self, request: Request, wish: protocol.DetokenizeRequest) -> Response:
        ids = wish.tokens

        def decoded() -> Response:
            return json_response({"content": self.tokenizer.decode(checked_ids(ids, self.config.vocab))})

        return await self._slowly(len(ids), decoded)

    async def attend(self, request: Request, wish: protocol.AttentionRequest) -> Response:
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
            texts = [wish.text or ""] if wish.messages is None else ["x" * m.length("messages") for m in wish.messages]
            self._check_length(sum(map(len, texts)), "text")
            ids = await self._slowly(sum(map(len, texts)), lambda: self._ids_of(wish))
        checked_ids(ids, self.config.vocab)
        if not 1 <= len(ids) <= most:
            raise ApiError(
                400,
                f"the text has {len(ids)} tokens, attention is shown for 1 to {most}",
                code="context_length_exceeded" if ids else None,
            )

        def picture() -> Generator[None, None, Any]:
            yield
            return attention_of(self.model, ids, wish.layer)[wish.head]

        weights = await self._background(request, picture())
        return await self._slowly(weights.size, lambda: json_response(self._attention_body(wish, ids, weights)))

    async def _background(self, request: Request, work: Generator[None, None, Any]) -> Any:
        """What the engine's background job returns."""
        if self.engine.draining:
            raise shutting_down()
        job = asyncio.ensure_future(self.engine.background(work))
        gone = asyncio.ensure_future(_disconnected(request.receive))
        try:
            await asyncio.wait({job, gone}, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                raise ClientGone if gone.done() else self._failed("deadline")
            return job.result()
        except QueueFull:
            raise busy() from None
        finally:
            job.cancel()
            gone.cancel()

    def _attention_body(self, wish: protocol.AttentionRequest, ids: Sequence[int], weights: Any) -> dict[str, Any]:
        op = self.attention[wish.layer]
        return {
            "object": "attention",
            "model": self.name,
            "layer": wish.layer,
            "head": wish.head,
            "layers": len(self.attention),
            "heads": op.heads,
            "causal": bool(op.causal),
            "tokens": [{"id": i, "text": self.tokenizer.token_bytes(i).decode("utf-8", "replace")} for i in ids],
            "weights": weights.round(4).tolist(),
        }

    def _ids_of(self, wish: protocol.AttentionRequest) -> list[int]:
        if wish.messages is not None:
            return protocol.encode_chat(self.template, self.tokenizer, wish.messages, False, form=self.call_form)
        return [*start_ids(self.tokenizer), *self.tokenizer.encode(wish.text or "")]

    # --- the server itself

    async def health(self, request: Request) -> Response:
        if self.engine.draining:
            return json_response({"status": "draining"}, 503)
        return json_response({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        if self._description is None:
            self._description = json_response(description(self.name, bool(self.key)))
        return self._description


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streamed answer: server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, app: App, answer: Answer, writer: Any, headers: dict[str, str]) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self.app, self.answer, self.writer = app, answer, writer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def out(body: bytes, more: bool = True) -> None:
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
                    events += self.writer.closing(self.answer)
                if events:
                    await out(events, more=bool(left))
        except ApiError as error:
            await out(self.writer.failure(error), more=False)
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
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(message)
            except TimeoutError:
                raise ClientGone from None

        try:
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
            path = scope["path"] if scope["path"] in LABELS else "other"
            self.app.metrics.requests.labels(path, str(status)).inc()
            self.app.metrics.seconds.labels(path).observe(time.monotonic() - started)


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
