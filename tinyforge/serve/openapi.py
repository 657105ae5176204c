"""The OpenAPI description of the server, from the models of its requests."""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from typing import Any

from pydantic.json_schema import models_json_schema

from tinyforge.serve.protocol import (
    AttentionRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

POSTS: dict[str, tuple[type[Any], str, bool]] = {
    "/v1/chat/completions": (ChatRequest, "The reply to a conversation, whole or as server-sent events.", True),
    "/v1/completions": (CompletionRequest, "The continuation of a text, whole or as server-sent events.", True),
    "/v1/attention": (AttentionRequest, "The weights of an attention head over a text, as a matrix.", False),
    "/tokenize": (TokenizeRequest, "A text's token ids.", False),
    "/detokenize": (DetokenizeRequest, "The text of token ids.", False),
}
GETS = {
    "/v1/models": "The served model.",
    "/props": "Its context and chat template, in llama.cpp's format.",
    "/health": "Whether requests are accepted.",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
STATUSES = {
    "400": "A wrong request: the error names the field.",
    "401": "Wrong or no API key.",
    "403": "Wrong host or origin.",
    "404": "No such model.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "429": "Busy: Retry-After says when to try again.",
    "503": "Shutting down.",
    "504": "Not ready in time.",
}


def description(model: str, key: bool) -> dict[str, Any]:
    """The description in OpenAPI 3.1. model: its name. key: whether callers need an API key."""
    _, schemas = models_json_schema(
        [(kind, "validation") for kind, _, _ in POSTS.values()], ref_template="#/components/schemas/{model}"
    )
    for schema in schemas["$defs"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [model, None], "description": "May be left out."}
    version = "0"
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("tinyforge")
    paths: dict[str, Any] = {}
    for path, (kind, what, streams) in POSTS.items():
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        ref = {"$ref": f"#/components/schemas/{kind.__name__}"}
        paths[path] = {
            "post": {
                "summary": what,
                "operationId": path.strip("/").replace("/", "_"),
                "requestBody": {"required": True, "content": {"application/json": {"schema": ref}}},
                "responses": {"200": {"description": "The answer.", "content": content}, **_errors(STATUSES)},
            }
        }
    for path, what in GETS.items():
        answer = {"application/json": {"schema": {"type": "object"}}}
        few = {status: STATUSES[status] for status in ("401", "403", "503")}
        paths[path] = {
            "get": {
                "summary": what,
                "operationId": path.strip("/").replace("/", "_"),
                "responses": {"200": {"description": "The answer.", "content": answer}, **_errors(few)},
            }
        }
    paths["/metrics"] = {
        "get": {
            "summary": "Metrics for Prometheus.",
            "operationId": "metrics",
            "responses": {
                "200": {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}},
                **_errors({status: STATUSES[status] for status in ("401", "403")}),
            },
        }
    }
    components: dict[str, Any] = {"schemas": {**schemas["$defs"], "Error": ERROR}}
    if key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"tinyforge, serving {model}", "version": version},
        "paths": paths,
        "components": components,
        **({"security": [{"key": []}]} if key else {}),
    }


def _errors(statuses: dict[str, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": what, "content": content} for status, what in statuses.items()}
