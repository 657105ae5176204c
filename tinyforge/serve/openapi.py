"""The OpenAPI description of the server, from the models of its requests."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from tinyforge.requirements import version_of
from tinyforge.serve.routes import ENDPOINTS, Endpoint


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has all of these properties."""
    return {"type": "object", "required": [*properties], "properties": properties}


TEXT, TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
ERROR = _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL))
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
    bodies = [e.body for e in ENDPOINTS if e.body]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    for schema in schemas["$defs"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [model, None], "description": "May be left out."}
    paths = {e.path: {e.method.lower(): _operation(e)} for e in ENDPOINTS if e.summary}
    components: dict[str, Any] = {"schemas": {**schemas["$defs"], "Error": ERROR}}
    if key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"tinyforge, serving {model}", "version": version_of("tinyforge") or "0"},
        "paths": paths,
        "components": components,
        **({"security": [{"key": []}]} if key else {}),
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    schema = {"type": "object"} if endpoint.media == "application/json" else TEXT
    content = {endpoint.media: {"schema": schema}}
    summary = f"{endpoint.summary}."
    if endpoint.streams:
        content["text/event-stream"] = {"schema": TEXT}
        summary = f"{endpoint.summary}, whole or as server-sent events."
    operation: dict[str, Any] = {"summary": summary, "operationId": endpoint.path.strip("/").replace("/", "_")}
    errors = {status: STATUSES[status] for status in ("401", "403", "503")}
    if endpoint.body:
        ref = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref}}}
        errors = STATUSES
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    said = {status: {"description": what, "content": failed} for status, what in errors.items()}
    operation["responses"] = {"200": {"description": "The answer.", "content": content}, **said}
    return operation
