"""`shapeshift add`: what it recognises, refuses, writes, builds and loads."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from shapeshift.build_engines import add, new_model, publish
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.cli.examples import how_to_call
from shapeshift.cli.main import main
from shapeshift.engines import capacity, failures, hardware
from shapeshift.engines.capacity import Machine
from shapeshift.errors import EngineError
from shapeshift.triton import model_config
from shapeshift.triton.control import ModelControl
from shapeshift.triton.embedded.server import TritonServer
from tests.engines import gguf_models
from tests.engines.families import save_model, save_modules, save_tokenizer
from tests.engines.test_engines_vectors import save_splade
from tests.fused_decode.checkpoints import make_checkpoint
from tests.token_adapt.timm_models import small_checkpoint
from tests.token_adapt.vision_families import CASES, write

LABELS = {0: "bad", 1: "good", 2: "mixed"}
Make = Callable[[Path], object]


def embedder(folder: Path) -> None:
    save_modules(save_model(folder, "bert"), "cls", prompts={"prompts": {"query": "w1 "}})


def decoder_embedder(folder: Path) -> None:
    """Its class is that of a model that generates."""
    save_modules(save_model(folder, "qwen3", "AutoModelForCausalLM"), "lasttoken")


def embedder_of_a_classifier(folder: Path) -> None:
    save_modules(save_model(folder, "bert", "AutoModelForSequenceClassification"), "max", normalize=False)


def classifier(folder: Path) -> None:
    save_model(folder, "electra", "AutoModelForSequenceClassification", id2label=LABELS)


def tagger(folder: Path) -> None:
    save_model(folder, "bert", "AutoModelForTokenClassification", id2label=LABELS)


def nameless_decoder(folder: Path) -> None:
    """No file names a class of transformers."""
    make_checkpoint(folder)
    change(folder, architectures=None)


def short_roberta(folder: Path) -> None:
    """Its limit includes the positions of padding, whose id config.json leaves to the class."""
    file = save_model(folder, "camembert") / "config.json"
    stated = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in stated.items() if key != "pad_token_id"}))


def embedding_gemma(folder: Path) -> None:
    save_modules(save_model(folder, "gemma3_text"))


def splade(folder: Path) -> None:
    save_splade(folder, "bert")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project in the working directory; its model repository."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.delenv("SHAPESHIFT_KEY", raising=False)
    return project / "model_repository"


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != ".engines.lock"}


def stated(model: Path) -> dict[str, Any]:
    """Backend, listed tensors and parameters of a config.pbtxt."""
    config = model_config.read(model / "config.pbtxt")
    tensors = [tensor.name for tensor in (*config.input, *config.output)]
    return {"backend": config.backend, "tensors": tensors, **model_config.parameters(config)}


@pytest.mark.parametrize(
    ("make", "backend", "tensors", "said"),
    [
        (embedder, "polymorph", [], ["EMBEDDING [16] of a BERT", "pooling: cls;", "prompts: query", "1 to 64 tokens"]),
        (decoder_embedder, "polymorph", [], ["EMBEDDING [16] of a Qwen3", "pooling: lasttoken;"]),
        (
            embedder_of_a_classifier,
            "polymorph",
            [],
            ["EMBEDDING [16] of a BERT", "pooling: max; vectors are not scaled"],
        ),
        (
            classifier,
            "polymorph",
            ["TEXT_PAIR", "LOGITS"],
            ["LOGITS [3] of a ELECTRA", "labels: bad, good, mixed; scores: softmax of LOGITS"],
        ),
        (
            tagger,
            "polymorph",
            ["TOKEN_LOGITS", "OFFSETS", "ENTITIES"],
            ["TOKEN_LOGITS [-1, 3]", "labels: bad, good, mixed"],
        ),
        (splade, "polymorph", ["SPARSE_INDICES", "SPARSE_VALUES"], ["TERM_WEIGHTS [64] of a BERT"]),
        (make_checkpoint, "fused_decode", [], ["of a llama, 2 layers", "32 requests at once", "1024 tokens each"]),
        (nameless_decoder, "fused_decode", [], ["of a llama, 2 layers", "architectures none, model_type llama"]),
        (embedding_gemma, "polymorph", [], ["EMBEDDING [16] of a EmbeddingGemma", "pooling: mean;"]),
        (short_roberta, "polymorph", [], ["of a CamemBERT", "limits: texts of 1 to 62 tokens"]),
        (small_checkpoint, "token_adapt", [], ["labels of images, 32 x 32 pixels", "`shapeshift tasks train`"]),
    ],
)
def test_what_a_checkpoint_is_for_is_read_from_its_files(
    make: Make, backend: str, tensors: list[str], said: list[str], models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(models.parent / "mine")
    assert main(["add", "mine"]) == 0
    output = capsys.readouterr().out
    assert all(part in output for part in (*said, "memory: ", "added model_repository/mine")), output
    found = stated(models / "mine")
    assert (found["backend"], found["tensors"]) == (backend, tensors)
    assert found["checkpoint"] == str(models.parent / "mine")
    assert len((models / "mine" / "config.pbtxt").read_text().splitlines()) <= 10
    unary = ["mine_unary"] if backend == "fused_decode" else []
    assert sorted(path.name for path in models.iterdir()) == ["mine", *unary]
    assert f"`shapeshift engines {' '.join(['mine', *unary])}` builds {'them' if unary else 'it'}" in output
    if unary:
        assert stated(models / "mine_unary") == {"backend": backend, "tensors": [], "forward_to": "mine"}
    assert files_below(models.parent / "build") == set()
    assert main(["validate"]) == 0


def chat_model(folder: Path) -> None:
    make_checkpoint(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


def cross_encoder(folder: Path) -> None:
    save_model(folder, "bert", "AutoModelForSequenceClassification", num_labels=1)
    change(folder, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (embedder, "/v2/models/mine/infer -d {'inputs': [TEXT]}"),
        (classifier, "/v2/models/mine/infer -d {'inputs': [TEXT]}"),
        (cross_encoder, "/v2/models/mine/infer -d {'inputs': [TEXT, TEXT_PAIR]}"),
        (make_checkpoint, "/v2/models/mine/generate -d {'text_input', 'max_tokens'}"),
        (chat_model, ":8080/v1/chat/completions -d {'model', 'messages', 'max_tokens'}"),
    ],
)
def test_the_example_fits_the_model(make: Make, example: str, models: Path) -> None:
    make(models.parent / "mine")
    assert main(["add", "mine"]) == 0
    said = how_to_call(["mine"], [models], "localhost", 8000, 8001)
    url, _, body = said.strip().removeprefix("mine\ncurl -s ").partition(" -d ")
    sent = json.loads(body.strip("'"))
    inputs = ", ".join(one["name"] for one in sent.get("inputs", []))
    fields = f"'inputs': [{inputs}]" if inputs else ", ".join(map(repr, sent))
    assert f"{url} -d {{{fields}}}".endswith(example)


@pytest.mark.parametrize("variant", ["classifier", "features"])
def test_the_example_of_images_without_labels_says_how_to_get_a_task(variant: str, models: Path) -> None:
    case = next(case for case in CASES if (case.family, case.variant) == ("vit", variant))
    write(case, models.parent / "mine")
    assert main(["add", "mine"]) == 0
    said = (models / "mine" / "how_to_call.txt").read_text()
    first = "shapeshift tasks register build/my-tasks/mine --model mine --data FOLDER\n"
    assert (first in said) is (variant == "features")
    assert said.endswith("}]}'\n") and "curl -s {host}:{http_port}/v2/models/mine/infer -d '" in said


def test_name_technique_and_checkpoint_are_the_users(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(models.parent / "checkpoints" / "owner" / "tiny llama")
    assert main(["add", "owner/tiny llama", "--as", "mine", "--technique", "adapter_cache"]) == 0
    assert main(["add", "checkpoints/owner/tiny llama"]) == 0
    assert sorted(path.name for path in models.iterdir()) == ["mine", "mine_unary", "tiny_llama", "tiny_llama_unary"]
    assert [stated(models / name)["backend"] for name in ("mine", "mine_unary")] == ["adapter_cache"] * 2
    for name in ("mine", "tiny_llama"):
        assert stated(models / name)["checkpoint"] == "owner/tiny llama"
    assert "adapter_cache (--technique)" in capsys.readouterr().out


def test_an_encoder_takes_adapters_where_they_are_asked_for(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(models.parent / "checkpoints" / "mine", "bert", "AutoModelForSequenceClassification")
    assert main(["add", "mine", "--technique", "adapter_cache"]) == 0
    front = stated(models / "mine")
    assert (front["backend"], front["adapter_mb"]) == ("polymorph", "256") and "max_bins" not in front
    assert front["tensors"] == ["TEXT_PAIR", "LOGITS"]
    assert "(native), with LoRA adapters" in capsys.readouterr().out


def test_a_link_keeps_its_name(models: Path) -> None:
    """Adapters may name their base model by it."""
    make_checkpoint(models.parent / "checkpoints" / "original")
    (models.parent / "elsewhere").mkdir()
    (models.parent / "elsewhere" / "my-llama").symlink_to(models.parent / "checkpoints" / "original")
    assert main(["add", "elsewhere/../elsewhere/my-llama"]) == 0
    assert stated(models / "my-llama")["checkpoint"] == str(models.parent / "elsewhere" / "my-llama")


def test_a_folder_in_the_working_directory_hides_no_checkpoint(models: Path) -> None:
    make_checkpoint(models.parent / "checkpoints" / "mine")
    classifier(models.parent / "mine")
    assert main(["add", "mine"]) == 0
    assert (stated(models / "mine")["checkpoint"], stated(models / "mine")["backend"]) == ("mine", "fused_decode")
    assert main(["add", "./mine", "--as", "other"]) == 0
    assert stated(models / "other")["checkpoint"] == str(models.parent / "mine")


def change(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def empty(folder: Path) -> None:
    folder.mkdir()


def without_a_shard(folder: Path) -> None:
    save_model(folder, "bert")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def cut_off(folder: Path) -> None:
    os.truncate(save_model(folder, "bert") / "model.safetensors", 3000)


def quantised(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(save_model(folder, "bert") / "model.safetensors")
    save_file({name: value.astype(np.int8) for name, value in tensors.items()}, folder / "model.safetensors")


def pooled_twice(folder: Path) -> None:
    embedder(folder)
    listed = json.loads((folder / "modules.json").read_text())
    listed.insert(1, listed[1])
    (folder / "modules.json").write_text(json.dumps(listed))


def without_a_label(folder: Path) -> None:
    classifier(folder)
    change(folder, id2label={"0": "bad", "2": "good", "3": "mixed"})


def foreign_tokenizer(folder: Path) -> None:
    save_model(folder, "bert", vocab_size=50)
    save_tokenizer(folder)


def foreign_decoder_tokenizer(folder: Path) -> None:
    make_checkpoint(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["beyond"] = 400
    (folder / "tokenizer.json").write_text(json.dumps(content))


def adapter(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")


def unknown_decoder(folder: Path) -> None:
    make_checkpoint(folder)
    change(folder, model_type="mamba", architectures=["MambaForCausalLM"])


def foreign_code(folder: Path) -> None:
    """As gte-multilingual-base, whose classes are files of the checkpoint."""
    save_model(folder, "bert")
    change(folder, model_type="new", architectures=["NewModel"], auto_map={"AutoModel": "modeling.NewModel"})


def foreign_classifier(folder: Path) -> None:
    save_model(folder, "bert", "AutoModelForSequenceClassification")
    change(folder, model_type="mobilebert", architectures=["MobileBertForSequenceClassification"])


def decoder_classifier(folder: Path) -> None:
    save_model(folder, "qwen3", "AutoModelForSequenceClassification")
    change(folder, model_type="mistral", architectures=["MistralForSequenceClassification"])


def causal_gemma(folder: Path) -> None:
    embedding_gemma(folder)
    change(folder, use_bidirectional_attention=False)


def experts(folder: Path) -> None:
    make_checkpoint(folder)
    change(folder, model_type="phimoe", architectures=["PhimoeForCausalLM"], num_local_experts=8)


def nameless_foreign_decoder(folder: Path) -> None:
    make_checkpoint(folder)
    change(folder, model_type="opt", architectures=[])


def one_label_of_several(folder: Path) -> None:
    save_model(folder, "bert", "AutoModelForSequenceClassification", num_labels=1)
    change(folder, problem_type="single_label_classification")


def only_pickles(folder: Path) -> None:
    (save_model(folder, "bert") / "model.safetensors").rename(folder / "pytorch_model.bin")


REFUSED: dict[str, tuple[Make, str, str]] = {
    "empty": (empty, "INVALID_ARG", "; must hold config.json, as transformers and timm write it"),
    "shard": (without_a_shard, "INVALID_ARG", "model-00002-of-00002.safetensors, which model.safetensors.index.json"),
    "cut off": (cut_off, "INVALID_ARG", "; a whole safetensors file (Error"),
    "quantised": (quantised, "INVALID_ARG", "got 'I8'; F64, F32, F16, BF16 in "),
    "poolings": (pooled_twice, "INVALID_ARG", "modules.json: got '2 poolings'; one Pooling in "),
    "label": (
        without_a_label,
        "INVALID_ARG",
        "id2label: got ['0', '2', '3']; a name for each id from 0 in config.json; 1 is",
    ),
    "tokenizer": (foreign_tokenizer, "INVALID_ARG", "tokenizer.json: got 'id 63'; ids below 50, the vocab_size of"),
    "decoder's": (foreign_decoder_tokenizer, "INVALID_ARG", "tokenizer.json: got 'id 400'; ids below 400, the vocab"),
    "adapter": (adapter, "UNSUPPORTED", "use `shapeshift adapters add`"),
    "decoder": (unknown_decoder, "INVALID_ARG", "model_type: got 'mamba'; one of llama, "),
    "nameless": (nameless_foreign_decoder, "INVALID_ARG", "model_type: got 'opt'; one of llama, "),
    "code": (foreign_code, "UNSUPPORTED", "model_type new is not one that transformers has; code of the checkpoint's"),
    "classifier": (
        foreign_classifier,
        "UNSUPPORTED",
        "classifiers of model_type mobilebert are not served; those of bert",
    ),
    "decoder that classifies": (
        decoder_classifier,
        "UNSUPPORTED",
        "model_type mistral is a decoder that polymorph does",
    ),
    "problem": (one_label_of_several, "INVALID_ARG", "problem_type: got 'single_label_classification'; one of multi"),
    "causal Gemma": (causal_gemma, "UNSUPPORTED", "model_type gemma3_text is a decoder that polymorph does not serve"),
    "experts": (experts, "INVALID_ARG", "got 'phimoe'; this one has a mixture of experts"),
    "pickles": (only_pickles, "INVALID_ARG", "pytorch_model.bin, which can execute code when read; weights must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line(
    case: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, code, reason = REFUSED[case]
    make(models.parent / "mine")
    capsys.readouterr()
    before = files_below(models.parent)
    assert main(["add", "mine"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.err.startswith(f"shapeshift add: {code}: mine: ")
    assert reason in said.err and "added" not in said.out
    assert files_below(models.parent) - {"build"} == before


def test_a_taken_name_is_refused(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(models.parent / "mine")
    for taken in (models / "one", models / "two_unary", models.parent / "build" / "repository" / "three"):
        taken.mkdir(parents=True)
    (models / "four_w00").mkdir()
    (models / "four_w00" / "config.pbtxt").write_text("")
    for name in ("one", "two", "three", "four", "no/name"):
        assert main(["add", "mine", "--as", name]) == 2
        error = capsys.readouterr().err
        assert error.startswith("shapeshift add: INVALID_ARG: mine: ") and error.count("\n") == 1
        assert ("give another with --as" in error) is (name in ("one", "two", "three")), error
    assert sorted(path.name for path in models.iterdir()) == ["four_w00", "one", "two_unary"]


def test_a_model_that_does_not_fit_in_the_memory_is_refused(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(models.parent / "mine")
    slot_mb = 2 * 2 * 32 * 1024 * 2 / 2**20
    monkeypatch.setattr(capacity, "this_machine", lambda: Machine(2, 12 * slot_mb))
    assert main(["add", "mine", "--as", "small"]) == 0
    slots = int(stated(models / "small")["max_concurrency"])
    assert 4 <= slots <= 12
    shutil.rmtree(models)
    monkeypatch.setattr(capacity, "this_machine", lambda: Machine(2, 0.4))
    before = files_below(models.parent)
    assert main(["add", "mine"]) == 2
    assert "UNSUPPORTED: mine: memory: mine: memory_mb: got 0; at least " in capsys.readouterr().err
    assert files_below(models.parent) == before


@pytest.mark.parametrize("end", ["", ".gguf"])
def test_models_that_are_not_built_yet_take_memory_too(
    end: str, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two models of 13 GB on a machine of 24 GB."""
    first, second = (models.parent / f"{name}{end}" for name in ("first", "second"))
    for seed, place in enumerate((first, second)):
        if end:
            gguf_models.write(place, seed=seed)
        else:
            make_checkpoint(place, seed)
    monkeypatch.setattr(hardware, "resolve_precision", lambda *_, **__: "f32")
    weights_mb = (first if end else first / "model.safetensors").stat().st_size / 2**20
    monkeypatch.setattr(new_model, "sizes_of", lambda *_: {"max_concurrency": "1", "max_length": "2"})
    monkeypatch.setattr(capacity, "this_machine", lambda: Machine(2, 1.8 * weights_mb))
    assert main(["add", str(first)]) == 0
    before = files_below(models)
    assert main(["add", str(second)]) == 2
    error = capsys.readouterr().err
    assert "memory: second: memory_mb: got 0; at least " in error and "left for it" in error
    assert files_below(models) == before


class HalfServer:
    """Loads all models but those that forward."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def load(self, name: str) -> None:
        self.calls.append(("load", name))
        if name.endswith("_unary"):
            raise EngineError("not this one")

    def unload(self, name: str) -> None:
        self.calls.append(("unload", name))

    def wait_unloaded(self, name: str) -> None:
        self.calls.append(("wait", name))


def test_if_one_of_two_models_fails_neither_stays(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(models.parent / "mine")
    built: list[str] = []

    def build(front: Any, paths: BuildPaths) -> str:
        built.append(front.name)
        for folder in (paths.generated, paths.build / "adapters"):
            (folder / front.name).mkdir(parents=True)
        return "built"

    monkeypatch.setattr(publish, "publish", build)
    (models / "other").mkdir(parents=True)
    paths, server = BuildPaths(models.parent, models.parent / "build", models), HalfServer()
    before = files_below(models.parent) | {"build", "build/repository", "build/adapters"}
    with pytest.raises(EngineError, match="not this one"):
        add.add(add.NewModel("mine"), paths, server, {"encode"}, lambda text: None)
    assert built == ["mine", "mine_unary"]
    assert files_below(models.parent) == before
    undone = [(call, name) for name in ("mine_unary", "mine") for call in ("unload", "wait")]
    assert server.calls == [("load", "mine"), ("load", "mine_unary"), *undone]


# With a server.


@pytest.fixture
def build(encode_server: TritonServer) -> Path:
    """The build folder of the server that runs, with a model repository of its own."""
    return encode_server.settings.run_directory.parent


def add_to(build: Path, checkpoint: Path, name: str, models: Path, *more: str) -> int:
    command = ["add", str(checkpoint), "--as", name, "--repository", str(models), "--build", str(build)]
    return main([*command, *more])


def embed(server: TritonServer, model: str, text: str) -> Any:
    given = triton.InferInput("TEXT", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[text]], dtype=object))
    with triton.InferenceServerClient(server.grpc_url) as client:
        return client.infer(model, [given], client_timeout=120).as_numpy("EMBEDDING")[0]


@pytest.mark.server
def test_a_running_server_serves_the_model_at_once(
    encode_server: TritonServer, build: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedder(models.parent / "mine")
    failures.record(build, {"added": "an earlier reason", "other": "its reason"})
    assert add_to(build, models.parent / "mine", "added", models) == 0
    said = capsys.readouterr().out
    assert "the server has loaded it" in said and f"{encode_server.http_url}/v2/models/added/infer" in said
    vector = embed(encode_server, "added", "w1 w2")
    assert vector.shape == (16,) and abs(np.linalg.norm(vector) - 1) < 0.01
    assert failures.read(build) == {"other": "its reason"}
    failures.record(build, {})
    assert main(["validate", "--repository", str(models), "--build", str(build)]) == 0
    assert add_to(build, models.parent / "mine", "encode", models) == 2
    assert "a name that is free: give another with --as; the server has this model" in capsys.readouterr().err


@pytest.mark.server
def test_what_a_server_cannot_load_leaves_nothing(
    encode_server: TritonServer,
    build: Path,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embedder(models.parent / "mine")
    before = files_below(build), files_below(models.parent)
    # A folder that this server does not serve.
    monkeypatch.setenv("SHAPESHIFT_KEY", encode_server.key)
    elsewhere = tmp_path / "elsewhere"
    assert add_to(elsewhere, models.parent / "mine", "lost", models, "--server", encode_server.grpc_url) == 2
    assert "INTERNAL" in capsys.readouterr().err
    assert {path for path in files_below(elsewhere) if path.count("/")} == set()

    def fail(*_: object) -> None:
        raise EngineError("no engine today")

    monkeypatch.setattr(publish, "publish", fail)
    assert add_to(build, models.parent / "mine", "lost", models) == 2
    assert "INTERNAL: " in (error := capsys.readouterr().err) and error.endswith("mine: no engine today\n")
    assert (files_below(build), files_below(models.parent)) == before
    with ModelControl(encode_server.grpc_url, encode_server.key) as control:
        ready = {model.name for model in control.index() if model.state == "READY"}
    assert "encode" in ready and "lost" not in ready


@pytest.mark.long
@pytest.mark.server
def test_the_demo_model_answers_as_the_shipped_one(
    encode_server: TritonServer, build: Path, models: Path, demo_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    assert add_to(build, demo_checkpoint, "minilm", models) == 0
    mine = embed(encode_server, "minilm", "one text")
    with capsys.disabled():
        print(f"first answer after {time.monotonic() - start:.1f} s, {os.times().user:.0f} s of CPU")
    assert mine @ embed(encode_server, "encode", "one text") > 0.999
    shutil.rmtree(build / "repository" / "minilm")
