"""The process that renders chat templates: a template is a program of others, and Jinja's sandbox bounds neither its
time nor its memory.

    python jinja_sandbox.py     a line of JSON out, when it is ready: [process id, status of the one before it]
                                a line of JSON in: {"source": "...", "jobs": [{"messages": [...], ...}, ...]}
                                a line of JSON out: {"texts": ["...", ...]} or {"error": "..."}

It imports nothing but Jinja, starts in 0.1 s, serves one request after another, and ends with its standard input. Each
job has SECONDS of CPU time, after which the system kills the process, a copy of one that then makes another; all of it
has MEGABYTES of address space. It may not write files.

The environment is that of transformers' `apply_chat_template`: the immutable sandbox, trimmed blocks, loop controls,
`{% generation %}`, `raise_exception`, `strftime_now`, and a `tojson` that keeps its text as it is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS, MEGABYTES, MOST_CHARACTERS = 0.5, 512, 1 << 23


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: the reply's part of a template, rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which an attribute that it forbids is an error also where it is only printed."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        kind = type(obj).__name__
        raise SecurityError(f"the attribute {attribute!r:.40} of a {kind} is not for templates")


class SafeNamespace(Namespace):
    """`namespace(...)` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805 (a template may name an attribute self)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r:.40}: names may not begin with an underscore")


def raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@lru_cache(8)
def compiled(source: str) -> jinja2.Template:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": make_dict,
        "namespace": SafeNamespace,
    }
    return environment.from_string(source)


def render(source: str, job: dict[str, Any]) -> str:
    text = compiled(source).render(job)
    if len(text) > MOST_CHARACTERS:
        raise TemplateError(f"it renders {len(text):,} characters, at most {MOST_CHARACTERS:,} are supported")
    return text


def answer(request: dict[str, Any]) -> dict[str, Any]:
    texts = []
    try:
        for job in request["jobs"]:
            _allow(SECONDS)
            texts.append(render(request["source"], job))
    except MemoryError:
        return {"error": f"it needs more than {MEGABYTES} MiB of memory"}
    except RecursionError:
        return {"error": "it calls itself without end, or nests too deeply"}
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:
        return {"error": str(error) if type(error) is TemplateError else f"{type(error).__name__}: {error}"}
    finally:
        _allow(0)
    return {"texts": texts}


def _allow(seconds: float) -> None:
    """CPU time until the system kills the process, 0 for no end."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    datetime.now().astimezone()  # reads the time zone's file
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all its processes
    if sys.platform != "win32":  # which has no such limits: there `jinja_client` ends it after a while
        import resource

        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        for which, limit in (
            (resource.RLIMIT_AS, MEGABYTES << 20),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(which, (limit, limit))
    status = 0
    while sys.platform != "win32" and (copy := os.fork()):
        status = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        if status >= 0:
            sys.exit(status)
    print(json.dumps([os.getpid(), status]), flush=True)
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
