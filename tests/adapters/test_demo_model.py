"""Tests of the demo model folder: its tokenizer, its weights and its creation."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer

from unisono.core.generation import FIRST_SPECIAL, VOCABULARY
from unisono.harmony.encoding import MARKERS, Encoding, load_encoding
from unisono_adapters import demo
from unisono_adapters.demo.weights import read_safetensors


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo.expand(demo.default_folder())


@pytest.fixture(scope="module")
def unpacked_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.expand(tmp_path_factory.mktemp("demo") / "plain", "bf16")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def encoding() -> Encoding:
    return load_encoding()


TEXTS = {
    "empty": "",
    "spaces": " ",
    "mixed whitespace": " \t\n\n  \r\n x \u00a0\u200b\ufeff",
    "English": "Hello, world! It's what I'd say; they'LL don't DON'T we've.",
    "accents": "na\u00efve caf\u00e9 \u2014 \u201cquotes\u201d \u2026 \u00bd \u00b2 \u0130stanbul \ufb01n \u1fb3",
    "combining": "e\u0301\u0301 U\u0308n\u0308",
    "Japanese and Korean": "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002 \ud55c\uad6d\uc5b4",
    "right to left": "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "emoji": "\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7",
    "code": "def f(x):\n    return {'a': [1, 2.5e-3, None]}\r\n\r\n// HTTPServer.getURL_v2()\n",
    "numbers": "1234567890 12,345.678 3 14 159 2653",
    "JSON": '{"location":"Paris","unit":"C","n":[1,2,3]}',
    "long runs": "a" * 500 + " " * 80 + "!" * 90,
    "near markers": "<|start |> <| end|> <|nothing|> <|reserved_1|>",
    "markers": "".join(MARKERS) + "assistant<|endoftext|><|startoftext|>",
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_tokenizer_matches_the_encoding(tokenizer: Tokenizer, encoding: Encoding, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids

    assert ids == encoding.encode_as_server(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_matches_the_encoding_for_random_text(tokenizer: Tokenizer, encoding: Encoding) -> None:
    generator = random.Random(5)
    alphabets = [range(32, 127), range(0xA0, 0x600), range(0x3040, 0xA000), range(0x1F300, 0x1F700), (9, 10, 13, 32)]
    for _ in range(400):
        length = generator.randint(1, 60)
        text = "".join(chr(generator.choice(generator.choice(alphabets))) for _ in range(length))
        assert tokenizer.encode(text, add_special_tokens=False).ids == encoding.encode_as_server(text), repr(text)


def test_special_tokens_have_their_ids(tokenizer: Tokenizer, encoding: Encoding) -> None:
    ids = range(FIRST_SPECIAL, VOCABULARY)

    assert [tokenizer.id_to_token(token) for token in ids] == [encoding.decode([token]) for token in ids]
    assert tokenizer.get_vocab_size() == VOCABULARY


@pytest.mark.slow
def test_layouts_contain_the_same_weights(folder: Path, unpacked_folder: Path) -> None:
    """Checked against the dequantisation of mlx."""
    import mlx.core as mx

    packed = mx.load(str(folder / "model.safetensors"))
    unpacked = mx.load(str(unpacked_folder / "model.safetensors"))
    experts = [name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")]
    for name in experts:
        blocks = packed[f"{name}_blocks"].view(mx.uint32).flatten(-2)
        weights = mx.dequantize(blocks, packed[f"{name}_scales"], group_size=32, bits=4, mode="mxfp4")
        assert mx.array_equal(weights.swapaxes(1, 2).astype(mx.bfloat16), unpacked[name]), name
    for name in packed.keys() & unpacked.keys():
        assert mx.array_equal(packed[name], unpacked[name]), name

    assert len(experts) == 8
    assert len(unpacked) == len(packed) - 8
    configs = [orjson.loads((each / "config.json").read_bytes()) for each in (folder, unpacked_folder)]
    assert configs[0].pop("quantization_config")["quant_method"] == "mxfp4"
    assert configs[0] == configs[1]


def test_untrained_tokens_share_one_row_of_weights(folder: Path) -> None:
    trained, _ = read_safetensors(demo.PACKED.read_bytes())
    expanded, _ = read_safetensors((folder / "model.safetensors").read_bytes())
    used = trained["used_ids"]
    others = np.setdiff1d(np.arange(VOCABULARY), used)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert expanded[name].shape[0] == VOCABULARY
        assert (expanded[name][used] == trained[name][:-1]).all()
        assert (expanded[name][others] == trained[name][-1]).all()


@pytest.mark.slow
def test_concurrent_processes_create_one_folder(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "demo"
    (target.parent / ".demo.new-killed").mkdir(parents=True)
    command = [sys.executable, "-m", "unisono_adapters.demo", "--out", str(target)]

    def expand(_: int) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(2) as pool:
        outputs = set(pool.map(expand, range(2)))

    assert outputs == {f"{target}\n"}
    assert sorted(path.name for path in target.parent.iterdir()) == [".demo.lock", "demo"]
    assert (target / "tokenizer.json").stat().st_mode & 0o777 == (target / "config.json").stat().st_mode & 0o777


def test_expanding_again_changes_nothing(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    assert demo.expand(folder) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_folder_with_other_content_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for target, layout in ((tmp_path, "mxfp4"), (folder, "bf16")):
        with pytest.raises(demo.DemoError, match="exists"):
            demo.expand(target, layout)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_unknown_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layout"):
        demo.expand(tmp_path / "new", "int8")

    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named_with_the_extra_to_install() -> None:
    assert demo.available() is None

    sources = str(demo.PACKED.parents[2])
    program = f"import sys; sys.path.insert(0, {sources!r}); from unisono_adapters import demo; print(demo.available())"
    without_packages = [sys.executable, "-S", "-c", program]
    reason = subprocess.run(without_packages, capture_output=True, text=True, check=True).stdout
    assert "mlx_lm" in reason
    assert "pip install" in reason
    assert "mlx-lm" in reason


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert demo.default_folder().parent == tmp_path / "unisono"
    assert demo.default_folder().name.startswith("demo-")
