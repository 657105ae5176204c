"""Structured output: whatever the model and the schema, a text that has ended is valid."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.infer.test_scheduler import Drawing
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.infer.decoder import Decoder, ReferenceDecoder
from tinyforge.infer.decoder_numpy import NumpyDecoder
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.scheduler import Request, Scheduler
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.rng import Stream
from tinyforge.tokenizers import TextTokenizer, load_tokenizer

pytest.importorskip("llguidance", reason="needs the extra [serve]")
from tinyforge.infer.grammar import MOST_TEXT, After, Grammars, closed, masks  # noqa: E402

SMALL = Path(__file__).resolve().parents[2] / "models" / "nanoeuler" / "small"
STOP = frozenset([510, 511])


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(SMALL / "tokenizer.json")


@pytest.fixture(scope="module")
def grammars(tokenizer: TextTokenizer) -> Grammars:
    return Grammars(tokenizer, STOP, 512)


@pytest.fixture(scope="module")
def model() -> NanoEuler:
    """Random weights: it has no idea of JSON."""
    config = Config(
        dim=32, heads=4, kv_heads=2, layers=1, context=1200, vocab=512, mtp_heads=2, hidden=44, mtp_weights=(1, 0.5)
    )
    made = NanoEuler(config, get_backend("numpy", "fp32", workers=1))
    made.initialise(0)
    return made


def ends_of_json(tokenizer: TextTokenizer) -> tuple[tuple[int, float], ...]:
    """A bias to what ends strings, numbers, lists, objects and texts, so that the texts are short."""
    ends = [tokenizer.encode(text, "text")[0] for text in '"]}n'] + sorted(STOP)
    return tuple((token, 9.0 - 0.5 * i) for i, token in enumerate(ends))


def run(scheduler: Scheduler) -> None:
    while scheduler.busy:
        scheduler.step()


def a_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of the kinds that clients send."""
    kinds = ["string", "pattern", "enum", "const", "integer", "number", "boolean", "null", "length"]
    kind = rng.choice(kinds if depth == 0 else [*kinds, *["object", "array", "anyOf", "ref", "map"] * 3])
    names = ["name", "age", "tags", "a b", "caf\u00e9", "id"]
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^[0-9]{3}-[0-9]{4}$", "^(yes|no)$"])}
    if kind == "length":
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 1, 2.5, None, True, "\u00fc\n", {"a": [1]}], rng.randrange(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["x", 3, [1, "a"], {"b": None}])}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randrange(-50, 5), "maximum": rng.randrange(5, 500)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": rng.choice([1, 10, 2.5])}
    if kind == "array":
        low = rng.randrange(3)
        return {"type": "array", "items": a_schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randrange(3)}
    if kind == "anyOf":
        return {"anyOf": [a_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    if kind == "map":
        return {"type": "object", "additionalProperties": a_schema(rng, 0)}
    if kind == "ref":
        node = {
            "type": "object",
            "properties": {"v": a_schema(rng, 0), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/node", "$defs": {"node": node}} if depth == 3 else a_schema(rng, depth - 1)
    if kind == "object":
        chosen = rng.sample(names, rng.randrange(1, 5))
        return {
            "type": "object",
            "properties": {name: a_schema(rng, depth - 1) for name in chosen},
            "required": rng.sample(chosen, rng.randrange(len(chosen) + 1)),
            "additionalProperties": False,
        }
    return {"type": kind}


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_every_reply_that_has_ended_is_valid(
    model: NanoEuler, tokenizer: TextTokenizer, grammars: Grammars, count: int
) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra [dev]")
    rng, bias = random.Random(count), ends_of_json(tokenizer)
    scheduler = Scheduler(model, 32, queue=count, decoder=NumpyDecoder(model, 32))
    asked: list[tuple[dict[str, Any], Request]] = []
    for seed in range(count):
        schema = a_schema(rng)
        constraint = grammars.compile("json_schema", json.dumps(schema))
        sampling = Sampling(
            temperature=rng.choice([0.0, 1.0]), top_k=rng.choice([0, 20]), seed=seed, logit_bias=bias, drafts=1
        )
        asked.append((schema, scheduler.submit([1, 2, 3], sampling, STOP, constraint=constraint)))
    run(scheduler)
    ended = 0
    for schema, request in asked:
        text = tokenizer.decode(request.tokens)
        assert request.reason in ("stop", "length"), (schema, text, request.reason)
        if request.reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(text), schema)
    print(f"\n{ended} of {count} ended, all valid")
    assert ended >= 0.97 * count


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_follow_the_grammar(
    model: NanoEuler, tokenizer: TextTokenizer, grammars: Grammars, temperature: float
) -> None:
    """Greedy texts are those without drafts; drafts are accepted, also up to where a grammar ends."""
    schemas = [{"enum": ["abcabcabcabc"]}, {"type": "array", "items": {"enum": [1, 11]}}, {"type": "boolean"}]
    found: dict[int, list[Any]] = {}
    for drafts in (0, 1):
        scheduler = Scheduler(model, 4)
        found[drafts] = [
            scheduler.submit(
                [1, 2, seed],
                Sampling(temperature, seed=seed, max_tokens=40, drafts=drafts, logit_bias=ends_of_json(tokenizer)),
                STOP,
                constraint=grammars.compile("json_schema", json.dumps(schemas[seed % 3])),
            )
            for seed in range(30)
        ]
        run(scheduler)
        for seed, request in enumerate(found[drafts]):
            if request.reason == "stop":
                json_value = json.loads(tokenizer.decode(request.tokens))
                assert (json_value == "abcabcabcabc", isinstance(json_value, list), type(json_value) is bool)[seed % 3]
        assert sum(request.reason == "stop" for request in found[drafts]) >= 20
    if temperature == 0:
        assert [r.tokens for r in found[0]] == [r.tokens for r in found[1]]
    assert sum(sum(r.stats.drafted) for r in found[1]) > 100
    assert sum(sum(r.stats.accepted) for r in found[1]) > 0


def test_a_decoder_that_draws_gives_the_texts_of_the_host(
    model: NanoEuler, tokenizer: TextTokenizer, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, next to texts without a grammar, whichever come and go; some grammars begin late."""
    rng = random.Random(4)
    asked: list[tuple[list[int], Sampling, frozenset[int], Any]] = []
    for seed in range(48):
        schema = json.dumps(rng.choice([{"enum": ["a", "abc", 5]}, {"type": "boolean"}, a_schema(rng, 1)]))
        constraint = grammars.compile("json_schema", schema) if seed % 3 else None
        if seed % 8 == 5 and constraint is not None:
            constraint = After(constraint, b"e", tokenizer.token_bytes, sorted(STOP))
        sampling = Sampling(
            temperature=rng.choice([0.0, 1.0]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1, 0.9]),
            seed=seed,
            max_tokens=rng.choice([1, 5, 30]),
            drafts=0,
        )
        asked.append(([rng.randrange(500) for _ in range(rng.choice([1, 2, 9, 40]))], sampling, STOP, constraint))

    def texts(decoder: Decoder, gaps: int) -> list[Any]:
        scheduler, requests, gone = Scheduler(model, 6, queue=64, decoder=decoder), [], []
        for i, (prompt, sampling, stop, constraint) in enumerate(asked):
            for _ in range(rng.randrange(gaps + 1)):
                scheduler.step()
            requests.append(scheduler.submit(prompt, sampling, stop, constraint=constraint and constraint.copy()))
            if gaps and i % 7 == 3:  # one that is cancelled
                gone.append(scheduler.submit(prompt, sampling, stop, constraint=constraint and constraint.copy()))
                scheduler.step()
                scheduler.cancel(gone[-1])
        run(scheduler)
        assert scheduler.free == list(range(6))
        return [(request.tokens, request.reason) for request in requests]

    def numbers(seed: int) -> Iterator[float]:  # each takes a block of the stream, as on a device
        stream = Stream(seed, "sample")
        while True:
            yield float(stream.uniform())

    monkeypatch.setattr("tinyforge.infer.scheduler.uniforms", numbers)
    expected = texts(ReferenceDecoder(model, 6), 0)
    for gaps in (0, 2):
        decoder = Drawing(model, 6)
        assert texts(decoder, gaps) == expected
        assert decoder.alone > 50
    reasons = [reason for _, reason in expected]
    assert reasons.count("stop") > 10 < reasons.count("length")


def test_masks_made_together_are_those_made_alone(tokenizer: TextTokenizer, grammars: Grammars) -> None:
    ended = grammars.compile("choice", '["x"]')
    assert ended.accept(tokenizer.encode("x", "text")[0])
    failed = grammars.compile("choice", '["x"]')
    assert not failed.accept(5) and failed.failed and not ended.failed
    after = After(ended.copy(), b"\n", tokenizer.token_bytes, sorted(STOP))
    begun = after.copy()
    assert begun.accept(tokenizer.encode("\n", "text")[0])
    constraints = [grammars.compile("regex", "[ab]c"), ended, after, begun, grammars.compile("json_schema", "{}")]
    found = np.unpackbits(masks([*constraints, failed]).view(np.uint8), axis=1, bitorder="little")
    for bits, constraint in zip(found, constraints, strict=False):
        z = np.zeros(512, np.float32)
        constraint.mask(z)
        assert np.array_equal(bits[:512] == 1, np.isfinite(z)) and 0 < (bits[:512] == 1).sum() < 512


def test_text_that_has_to_come_is_tokenized_once(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, asked = type(tokenizer).encode, list[str]()

    def counted(self: TextTokenizer, text: str, *args: Any) -> list[int]:
        asked.append(text)
        return encode(self, text, *args)

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    schema = json.dumps(
        {"type": "object", "properties": {"a_long_name": {"type": "boolean"}}, "required": ["a_long_name"]}
    )
    constraint = Grammars(tokenizer, STOP, 512).compile("json_schema", schema)
    counts = []
    for _ in range(2):
        one = constraint.copy()
        for token in encode(tokenizer, '{"a_long_name": true}', "text"):
            z = np.zeros(512, np.float32)
            one.mask(z)
            assert z[token] == 0 and one.accept(token)
        counts.append(len(asked))
    assert "a_long_name" in "".join(asked) and counts[0] == counts[1]


def test_a_text_never_ends_well_after_its_grammar_has_failed(model: NanoEuler, grammars: Grammars) -> None:
    """Its masks then mean nothing: a stop that is sampled is none."""
    failed = grammars.compile("choice", '["x"]')
    assert not failed.accept(5)
    for decoder in (ReferenceDecoder(model, 2), Drawing(model, 2)):
        bias = () if isinstance(decoder, Drawing) else ((510, 99.0),)
        scheduler = Scheduler(model, 2, decoder=decoder)
        request = scheduler.submit([1, 2], Sampling(logit_bias=bias), STOP, constraint=failed.copy())
        run(scheduler)
        assert request.reason == "grammar" and request.tokens == []


def reply(model: NanoEuler, tokenizer: TextTokenizer, constraint: Any, stop: frozenset[int] = STOP) -> tuple[str, Any]:
    scheduler = Scheduler(model, 2)
    bias = ends_of_json(tokenizer)
    request = scheduler.submit([5], Sampling(seed=1, logit_bias=bias, max_tokens=100), stop, constraint=constraint)
    run(scheduler)
    return tokenizer.decode(request.tokens), request.reason


def test_objects_that_list_their_properties_have_no_others() -> None:
    def of(*names: str, **more: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {name: {"type": "string"} for name in names}, **more}

    open_, shut = {"type": "object"}, {"additionalProperties": False}
    for given, expected in (
        (of("a"), of("a", **shut)),
        (of("a", additionalProperties=True), of("a", additionalProperties=True)),
        (open_, open_),
        ({"items": of("a")}, {"items": of("a", **shut)}),
        ({"anyOf": [of("a"), of("b")]}, {"anyOf": [of("a", **shut), of("b", **shut)]}),
        (of("a", anyOf=[of("b")]), of("a", anyOf=[of("b")])),  # both apply to one object
        ({"allOf": [of("a"), of("b")]}, {"allOf": [of("a"), of("b")]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": of("allOf")}}, {"$ref": "#/$defs/x", "$defs": {"x": of("allOf")}}),
        ({"const": of("a")}, {"const": of("a")}),
        (of("properties"), of("properties", **shut)),
        (True, True),
    ):
        assert closed(given) == expected


def test_choices_patterns_and_grammars(model: NanoEuler, tokenizer: TextTokenizer, grammars: Grammars) -> None:
    choices = ["yes", 'no "quoted"', "caf\u00e9 \U0001f600"]
    assert reply(model, tokenizer, grammars.compile("choice", json.dumps(choices)))[0] in choices
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", reply(model, tokenizer, grammars.compile("regex", "[0-9]{3}-[a-c]{2}"))[0])
    for grammar in ('root ::= "a" ("b" | "c")+ "d"', 'start: "a" /[bc]+/ "d"'):
        text, reason = reply(model, tokenizer, grammars.compile("grammar", grammar))
        assert re.match("a[bc]+", text) and (reason == "length") != text.endswith("d")


def test_a_tokenizer_without_an_end(model: NanoEuler, tokenizer: TextTokenizer) -> None:
    grammars = Grammars(tokenizer, (), 512)
    text, reason = reply(model, tokenizer, grammars.compile("choice", '["one", "two"]'), frozenset())
    assert text in ("one", "two") and reason == "stop"


HOSTILE: list[tuple[Any, str]] = [
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
    ("json_schema", '{"allOf": [{"type": "integer"}, {"type": "string"}]}'),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}'),
    ("json_schema", '{"type": "no such"}'),
    ("json_schema", '{"type": "string", "pattern": "("}'),
    ("json_schema", '{"type": "object", "patternProperties": 5}'),
    ("json_schema", "[" * 5000),
    ("json_schema", "not json"),
    ("grammar", "root ::= root"),
    ("grammar", "start: no_such_rule"),
    ("regex", "(" * 1000),
    ("json_schema", json.dumps({"enum": ["x" * 100] * (MOST_TEXT // 100)})),
]


@pytest.mark.parametrize(("kind", "text"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_grammar_that_cannot_be_used_is_an_error_of_one_line(grammars: Grammars, kind: Any, text: str) -> None:
    begun = time.process_time()
    with pytest.raises(UserError) as caught:
        grammars.compile(kind, text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a|b)*c{1000000}"),
        ("regex", "a{1000}{1000}{1000}{1000}"),
        ("regex", "((a{1,100}){1,100}){1,100}"),
        ("regex", "(.*a){30}.{40}b"),
        ("json_schema", json.dumps({"type": "string", "pattern": "^(a|b|ab)*(c|d){500,1000}$"})),
        ("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(1000)}})),
        ("json_schema", json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "integer"}})),
    ],
)
def test_grammars_of_many_states_take_bounded_time(
    model: NanoEuler, tokenizer: TextTokenizer, grammars: Grammars, kind: Any, text: str
) -> None:
    begun = time.process_time()
    constraint = grammars.compile(kind, text)
    _, reason = reply(model, tokenizer, constraint)
    scheduler = Scheduler(model, 2, decoder=Drawing(model, 2))
    drawn = scheduler.submit([5], Sampling(max_tokens=100), STOP, constraint=constraint.copy())
    run(scheduler)
    assert {reason, drawn.reason} <= {"length", "grammar", "stop"} and time.process_time() - begun < 8
