"""stories260K, trained and published by others: the greedy text is the published one, on every decoder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tinyforge.backends import get_backend
from tinyforge.chat import main as chat
from tinyforge.errors import UserError
from tinyforge.formats import load, load_pretrained, save_pretrained
from tinyforge.infer import Sampling, generate, make_decoder
from tinyforge.infer.decoder import Decoder, ReferenceDecoder
from tinyforge.infer.decoder_cpu import CPUDecoder
from tinyforge.infer.decoder_numpy import NumpyDecoder

FOLDER = Path(__file__).resolve().parents[3] / "shared/data/llama2c"
pytestmark = pytest.mark.skipif(
    not (FOLDER / "stories260K.bin").is_file(), reason=f"stories260K.bin of llama2.c is not in {FOLDER}"
)
FP32 = get_backend("numpy", "fp32", workers=1)


def published() -> str:
    """What stories260K.md says that `run stories260K.bin -t 0.0` prints."""
    page = (FOLDER / "stories260K.md").read_text(encoding="utf-8")
    found = re.search(r"-t 0\.0\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1].strip()


@pytest.mark.parametrize("kind", [ReferenceDecoder, NumpyDecoder])
def test_the_greedy_text_is_the_published_one(kind: type[Decoder]) -> None:
    model, tokenizer = load_pretrained(FOLDER / "stories260K.bin", FP32)
    assert tokenizer.bos == 1
    ids = generate(model, [1], Sampling(temperature=0, max_tokens=256), decoder=kind(model))
    assert tokenizer.decode(ids).strip() == published()


def test_the_fused_decoder_is_the_one_that_is_chosen() -> None:
    model, _ = load_pretrained(FOLDER / "stories260K.bin", FP32)
    assert isinstance(make_decoder(model), CPUDecoder)


def test_it_survives_every_format(tmp_path: Path) -> None:
    model, tokenizer = load_pretrained(FOLDER / "stories260K.bin", FP32)
    for name, format in (("m.bin", ""), ("hf", ""), ("own", "tinyforge")):
        save_pretrained(model, tokenizer, tmp_path / name, format=format)
        again, same = load_pretrained(tmp_path / name, FP32)
        assert same.encode("Once upon a time, Zoë") == tokenizer.encode("Once upon a time, Zoë"), name
        assert (again.buffer.values == model.buffer.values).all() and again.config == model.config, name
    for name in ("stories260K.bin", "tok512.bin"):
        ours = tmp_path / name.replace("stories260K", "m")
        assert ours.read_bytes()[:28] == (FOLDER / name).read_bytes()[:28]
    assert (tmp_path / "tok512.bin").read_bytes() == (FOLDER / "tok512.bin").read_bytes()


def test_transformers_tells_the_same_story(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the peer is transformers, on torch")
    transformers = pytest.importorskip("transformers", reason="the peer is transformers")
    save_pretrained(*load_pretrained(FOLDER / "stories260K.bin", FP32), tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == 1 == model.config.bos_token_id and model.config.eos_token_id == 2
    with torch.no_grad():
        told = model.generate(ids, max_new_tokens=257 - ids.shape[1], do_sample=False, eos_token_id=None)
    assert tokenizer.decode(told[0], skip_special_tokens=True).strip() == published()


def test_chat_continues_a_text_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--checkpoint", str(FOLDER / "stories260K.bin"), "--temperature", "0", "--max-tokens", "30"]
    assert chat([*flags, "--prompt", "Once upon a time", "--backend", "numpy"]) == 0
    told = capsys.readouterr().out
    assert ("Once upon a time" + told[:60].removeprefix("Once upon a time")) in published()


def test_the_tokenizer_is_found_or_asked_for(tmp_path: Path) -> None:
    alone = shutil.copy(FOLDER / "stories260K.bin", tmp_path / "stories260K.bin")
    with pytest.raises(UserError, match="has no tokenizer next to it; looked for tok512.bin, .*; give --tokenizer"):
        load(alone, FP32)
    assert load(alone, FP32, FOLDER / "tok512.bin").tokenizer.vocab_size == 512
    shutil.copy(FOLDER / "tok512.bin", tmp_path / "tokenizer.bin")
    assert load(alone, FP32).tokenizer.vocab_size == 512
