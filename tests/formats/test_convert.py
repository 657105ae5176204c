"""Converting: models with their tokenizers, from each format to the others, and what transformers makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.formats import convert, load, load_pretrained, save_pretrained
from tinyforge.formats.pretrained import next_command
from tinyforge.formats.tokenizers import TEMPLATE
from tinyforge.infer import Sampling, generate
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.params import named
from tinyforge.registry import find_model
from tinyforge.tokenizers import Tokenizer
from tinyforge.tokenizers.chat_templates import TEMPLATES

FP32 = get_backend("numpy", "fp32", workers=1)
END = "<|endoftext|>"
TEXT = "Once upon a time, Zoë's cat said 「hi」 12 times.\n\n  Then it slept."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(documents("train", 50, 0), 300, [END, "</s>"])


def make(kind: type, config: Any) -> Any:
    model = kind(config, FP32)
    model.initialise(seed=1)
    return model


def nanoeuler() -> NanoEuler:
    return make(NanoEuler, Config(dim=16, heads=4, kv_heads=2, layers=2, context=32, vocab=300, hidden=10))


@pytest.fixture
def run(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A run of ours with one checkpoint, and a card."""
    model = nanoeuler()
    meta = {
        "kind": "pretrain",
        "model": "nanoeuler",
        "config": model.config.to_dict(),
        "elapsed": 1.0,
        "tokenizer_hash": tokenizer.hash(),
    }
    checkpoint.save(tmp_path / "run", 7, named(model.buffer, model.buffer.masters, FP32), {}, tokenizer, meta, keep=1)
    (tmp_path / "run" / "README.md").write_text("# Ours\n\nWeights\nare float32.\n")
    return tmp_path / "run"


def logits(model: Any) -> np.ndarray:
    return model.logits(model.hidden(np.arange(20)[None]))


def test_the_next_command_can_be_typed_where_there_is_no_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tinyforge"])
    assert next_command(find_model("bert"), Path("my bert")) == "tinyforge classify --base 'my bert'"


@pytest.mark.parametrize(
    ("name", "flags"), [("a model's", []), ("own", ["--format", "tinyforge"]), ("m.bin", []), ("M.BIN", [])]
)
def test_a_run_survives_every_format(
    name: str, flags: list[str], run: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert.main([str(run), str(tmp_path / name), *flags]) == 0
    out, err = capsys.readouterr()
    assert (
        out.startswith(f"wrote {tmp_path / name}, 0.")
        and f"tinyforge.chat --checkpoint {quote(str(tmp_path / name))}" in out
    )
    assert ("left out: the 3 later output heads" in err) == (name != "own")
    found = load(tmp_path / name, FP32)
    assert type(found.model) is (NanoEuler if name == "own" else Llama)
    np.testing.assert_allclose(logits(found.model), logits(nanoeuler()), rtol=1e-5, atol=1e-7)
    assert found.tokenizer.encode(TEXT) == tokenizer.encode(TEXT)
    assert found.meta["model"] == ("nanoeuler" if name == "own" else "llama")
    if name == "own":
        assert found.meta["step"] == 7 and found.meta["elapsed"] == 1.0
        assert (tmp_path / "own" / "README.md").read_text() == (run / "README.md").read_text()


def test_bfloat16_to_give_away(run: Path, tmp_path: Path) -> None:
    for name, flags in (("own", ["--format", "tinyforge"]), ("hf", [])):
        assert convert.main([str(run), str(tmp_path / name), *flags, "--dtype", "bf16"]) == 0
        np.testing.assert_allclose(logits(load(tmp_path / name, FP32).model), logits(nanoeuler()), rtol=0.1, atol=1e-3)
        assert "are bfloat16." in (tmp_path / name / "README.md").read_text()
    # Rounded once: a second time changes nothing.
    assert convert.main([str(tmp_path / "own"), str(tmp_path / "again"), "--format", "tinyforge"]) == 0
    assert np.array_equal(logits(load(tmp_path / "again", FP32).model), logits(load(tmp_path / "own", FP32).model))


def test_int8_to_give_away(run: Path, tmp_path: Path) -> None:
    """The file as the safetensors library reads it, each weight's error, the card, and the formats after it."""
    own = tmp_path / "own"
    assert convert.main([str(run), str(own), "--format", "tinyforge", "--dtype", "int8"]) == 0
    stored, model, small = load_file(own / "model.safetensors"), nanoeuler(), load(own, FP32).model
    read = named(small.buffer, small.buffer.masters, FP32)
    matrices = 0
    for name, weight in named(model.buffer, model.buffer.masters, FP32).items():
        if weight.ndim < 2:
            assert stored[name].dtype == np.float32 and np.array_equal(stored.pop(name), weight), name
            continue
        matrices += 1
        codes, scales = stored.pop(name), stored.pop(f"{name}_scale")
        assert codes.dtype == np.int8 and scales.dtype == np.float32, name
        assert codes.shape == weight.shape and scales.shape == (*weight.shape[:-1], 1), name
        assert np.array_equal(read[name], codes * scales), name
        assert (np.abs(read[name] - weight) <= scales / 2 * (1 + 1e-5)).all() and (codes != 0).any(), name
    assert not stored and matrices > 2 * len(model.blocks)
    _, header = (own / "model.safetensors").read_bytes().split(b"{", 1)
    for entry in json.JSONDecoder().raw_decode("{" + header.decode("latin-1"))[0].values():
        assert entry.get("dtype") != "F32" or entry["data_offsets"][0] % 4 == 0
    assert "Weights\nare int8, with a float32 scale for each row of a matrix." in (own / "README.md").read_text()
    for name, flags in (("hf", []), ("m.bin", []), ("again", ["--format", "tinyforge"])):
        assert convert.main([str(own), str(tmp_path / name), *flags]) == 0
        np.testing.assert_allclose(logits(load(tmp_path / name, FP32).model), logits(small), rtol=1e-5, atol=1e-7)
    assert "Weights\nare float32." in (tmp_path / "again" / "README.md").read_text()


def test_weights_int8_of_an_int8_checkpoint_are_its_codes(run: Path, tmp_path: Path) -> None:
    assert convert.main([str(run), str(tmp_path / "own"), "--format", "tinyforge", "--dtype", "int8"]) == 0
    stored = load_file(tmp_path / "own" / "model.safetensors")
    held = [p for p in load(tmp_path / "own", FP32, weights="int8").model.params() if p.weights]
    assert held
    for p in held:
        assert np.array_equal(p.stored.codes, stored[p.name]), p.name
        np.testing.assert_array_max_ulp(p.stored.scales[..., None], stored[f"{p.name}_scale"], maxulp=1)


def test_int8_of_a_weight_that_is_not_finite_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = nanoeuler()
    model.blocks[1].attention.out.weight.value[3, 4] = np.inf
    with pytest.raises(UserError, match="a weight is not finite, and int8 cannot represent it; leave out --weights or"):
        save_pretrained(model, tokenizer, tmp_path / "own", format="tinyforge", dtype="int8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "model",
    [
        make(GPT2, GPT2Config(dim=12, heads=3, layers=2, context=32, vocab=300)),
        make(Llama, LlamaConfig(dim=12, heads=2, kv_heads=1, layers=2, context=32, vocab=320, hidden=5, qk_norm=True)),
    ],
    ids=["gpt2", "qwen3, with more ids than its tokenizer"],
)
def test_from_hugging_face_to_ours_and_back(model: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_pretrained(model, tokenizer, tmp_path / "hf")
    assert convert.main([str(tmp_path / "hf"), str(tmp_path / "own"), "--format", "tinyforge"]) == 0
    assert convert.main([str(tmp_path / "own"), str(tmp_path / "back")]) == 0
    for name in ("hf", "own", "back"):
        found, same = load_pretrained(tmp_path / name, FP32)
        assert np.array_equal(logits(found), logits(model)) and found.config == model.config, name
        assert same.encode(TEXT) == tokenizer.encode(TEXT), name
    assert f"{model.buffer.count:,} parameters" in (tmp_path / "own" / "README.md").read_text()
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    assert before == after
    assert before["eos_token_id"] == [tokenizer.specials[END], tokenizer.specials["</s>"]]
    assert before["bos_token_id"] is None


def test_transformers_reads_model_and_tokenizer(run: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the peer is transformers, on torch")
    transformers = pytest.importorskip("transformers", reason="the peer is transformers")
    assert convert.main([str(run), str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT)
    assert theirs.decode(tokenizer.encode(TEXT)) == TEXT
    assert theirs.eos_token_id == tokenizer.specials[END] and len(theirs) == tokenizer.vocab_size
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ours, _ = load_pretrained(run, FP32)
    prompt = tokenizer.encode("Once upon")
    expected = list(prompt)
    for _ in range(8):
        expected.append(int(ours.logits(ours.hidden(np.array([expected])))[0, -1].argmax()))
    with torch.no_grad():
        got = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert got[0].tolist() == expected


def test_a_chat_template_is_kept(run: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """By our own reader and by transformers; a base model has none."""
    meta = checkpoint.steps(run)[-1] / "meta.json"
    assert convert.main([str(run), str(tmp_path / "base")]) == 0
    assert not (tmp_path / "base" / TEMPLATE).exists() and load(tmp_path / "base", FP32).template.name == "plain"
    model = nanoeuler()
    kept = {**json.loads(meta.read_text()), "kind": "sft"}
    save_pretrained(model, tokenizer, tmp_path / "hf", meta=kept)
    found = load(tmp_path / "hf", FP32)
    assert found.template.name == "alpaca" and found.meta["kind"] == "sft"
    save_pretrained(found.model, found.tokenizer, tmp_path / "again", meta=found.meta)
    assert (tmp_path / "again" / TEMPLATE).read_text() == (tmp_path / "hf" / TEMPLATE).read_text()
    transformers = pytest.importorskip("transformers", reason="the peer is transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    chat = [{"role": role, "content": text} for role, text in (("user", "Hi."), ("assistant", "Ho."), ("user", "?"))]
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == TEMPLATES["alpaca"].encode(tokenizer, [("Hi.", "Ho."), ("?", None)], "")


@pytest.mark.parametrize("name", ["small", pytest.param("storyteller", marks=pytest.mark.slow)])
def test_models_that_come_with_the_repository_are_known_by_name(name: str, tmp_path: Path) -> None:
    assert convert.main([name, str(tmp_path / "hf")]) == 0
    assert load(tmp_path / "hf", FP32).template.name == "alpaca"


def test_gpt2s_tokenizer_as_it_was_first_published(tmp_path: Path) -> None:
    files = Path(__file__).resolve().parents[3] / "shared/data/gpt2"
    if not files.is_dir():
        pytest.skip(f"GPT-2's encoder.json and vocab.bpe are not in {files}")
    tokenizer = Tokenizer.from_gpt2(files / "encoder.json", files / "vocab.bpe")
    model = make(GPT2, GPT2Config(dim=4, heads=1, layers=1, context=8, vocab=50257))
    save_pretrained(model, tokenizer, tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "gpt2" / name).unlink()
    (tmp_path / "gpt2" / "vocab.json").write_bytes((files / "encoder.json").read_bytes())
    (tmp_path / "gpt2" / "merges.txt").write_bytes((files / "vocab.bpe").read_bytes())
    _, found = load_pretrained(tmp_path / "gpt2", FP32)
    assert found.hash() == tokenizer.hash()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["run", "run"], "run exists already; remove it, or choose another name"),
        (["run", "m.bin", "--dtype", "bf16"], "cannot save as llama2c in bf16; supported: .*llama2c in f32;"),
        (["run", "m.bin", "--dtype", "int8"], "cannot save as llama2c in int8; use --format tinyforge; supported"),
        (["run", "hf", "--dtype", "int8"], "cannot save as hf in int8; use --format tinyforge; supported"),
        (["run", "m.gguf", "--dtype", "int8"], "cannot save as gguf in int8; use q8_0; supported"),
        (["run", "x", "--format", "onnx"], "invalid choice: 'onnx'"),
        (["run", "x", "--tokenizer", "run"], "run has a tokenizer of its own; leave out --tokenizer"),
        (["run", "m.bin", "--format", "gguf"], "m.bin is not a name for --format gguf: llama2c's files end in .bin"),
        (["run", "m", "--format", "llama2c"], "m is not a name for --format llama2c"),
        (["run", "m.gguf", "--format", "hf"], "m.gguf is not a name for --format hf"),
        (["absent", "x"], "no checkpoint in absent"),
        (["absent.bin", "x"], "cannot read absent.bin: No such file"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(
    flags: list[str], message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        convert.main(flags)
    assert "\n" not in str(caught.value) and [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make(Llama, LlamaConfig(dim=4, heads=1, kv_heads=1, layers=1, context=8, vocab=299, hidden=3))
    save_pretrained(model, tokenizer, tmp_path / "hf")
    with pytest.raises(UserError, match="its tokenizer has 300 ids, the model 299; give its own with --tokenizer"):
        load(tmp_path / "hf", FP32)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    found = load(tmp_path / "hf", FP32)  # takes ids
    assert "note: " in capsys.readouterr().err and found.tokenizer.vocab_size == 299
    assert next(generate(found.model, [1, 2], Sampling(temperature=0.0))) < 299
    assert found.tokenizer.decode([1, 298]) == ""
    with pytest.raises(UserError, match="no tokenizer: it takes ids, not text"):
        found.tokenizer.encode("a")
    for name, format in (("again", "tinyforge"), ("m.gguf", "gguf")):
        save_pretrained(found.model, found.tokenizer, tmp_path / name, format=format)
        again = load(tmp_path / name, FP32)
        assert again.tokenizer.hash() == found.tokenizer.hash()
        assert next(generate(again.model, [1, 2], Sampling(temperature=0.0))) < 299


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", None])
def test_weights_that_others_have_quantised_are_refused_by_name(
    method: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = make(Llama, LlamaConfig(dim=4, heads=1, kv_heads=1, layers=1, context=8, vocab=300, hidden=3))
    save_pretrained(model, tokenizer, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"in the format of {method!r}, which is not read; get the model that they"):
        load(tmp_path / "hf", FP32)


def test_another_tokenizer_beside_a_bin_is_not_replaced(run: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert convert.main([str(run), str(tmp_path / "a.bin")]) == 0
    assert convert.main([str(run), str(tmp_path / "b.bin")]) == 0  # the same tokenizer serves both
    Tokenizer(tokenizer.merges[:-1], [END, "</s>", "<x>"]).save(tmp_path / "tok300.json")
    with pytest.raises(UserError, match="tok300.json exists already and is another tokenizer"):
        convert.main([str(run), str(tmp_path / "c.bin")])
    assert not (tmp_path / "c.bin").exists()


def test_a_tokenizer_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    odd = Tokenizer([], ["\udc80"])
    model = make(Llama, LlamaConfig(dim=4, heads=1, kv_heads=1, layers=1, context=8, vocab=300, hidden=3))
    with pytest.raises(UserError, match="lone surrogate"):
        save_pretrained(model, odd, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_wants() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinyforge.formats", "upload"],
        capture_output=True,
        text=True,
        cwd=Path(convert.__file__).parents[2],
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: usage: python -m tinyforge.formats convert") and done.stderr.count("\n") == 1
