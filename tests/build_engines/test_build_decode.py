"""`make engines` for fronts that generate text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shapeshift.build_engines.decoding import reference
from shapeshift.cli.main import main
from shapeshift.engines import capacity
from shapeshift.engines.capacity import Machine
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode import loading
from shapeshift.fused_decode.model import native_operations
from shapeshift.serving.model_args import ModelArgs
from shapeshift.triton import model_config
from tests.engines import gguf_models
from tests.fakes import logger
from tests.fused_decode.checkpoints import VOCABULARY, make_checkpoint

PROJECT = Path(__file__).resolve().parents[2]


class Project:
    """A project folder with the two fronts and a small checkpoint."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.checkpoint = make_checkpoint(root / "checkpoints" / "small")
        self._capsys = capsys
        for name in ("generate", "generate_unary"):
            self.change(name)

    def change(self, name: str = "generate", **parameters: object) -> None:
        """Write the repository's front with other parameters."""
        config = model_config.read(PROJECT / "tests" / "model_repository" / name / "config.pbtxt")
        parameters = {"checkpoint": "small", "native": "false", **parameters} if name == "generate" else parameters
        for key, value in parameters.items():
            model_config.set_parameter(config, key, str(value))
        folder = self.root / "model_repository" / name
        folder.mkdir(parents=True, exist_ok=True)
        model_config.write(config, folder / "config.pbtxt")

    def make(self, *models: str) -> tuple[int, str, str]:
        """Run the command: exit status, standard output, standard error."""
        status = main(["engines", *models])
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def generated(self, name: str = "generate") -> Path:
        return self.root / "build" / "repository" / name

    def checkpoint_of(self, name: str) -> Path:
        return (self.generated(name) / self.parameters(name)["checkpoint"]).resolve()

    def parameters(self, name: str = "generate") -> dict[str, str]:
        return model_config.parameters(model_config.read(self.generated(name) / "config.pbtxt"))


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path, capsys)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders for which kernels were requested; nothing is compiled."""
    asked: list[Path] = []

    def library(folder: Path, progress: Callable[[str], None]) -> Path:
        progress("compiling the kernels: 0 of 4 files")
        asked.append(folder)
        return folder / "x.so"

    monkeypatch.setattr(native_operations, "library", library)
    monkeypatch.setattr(reference, "require_logits", lambda *_: "logits as transformers'")
    return asked


def test_publishes_what_a_server_loads(project: Project) -> None:
    (project.root / "model_repository" / "generate" / "how_to_call.txt").write_text("curl {host}")
    status, out, err = project.make()
    assert (status, err) == (0, "")
    assert "generate: checked, logits as transformers'; checkpoint: small, " in out and "32 slots of 512 tokens" in out
    assert "generate_unary: forwards to generate" in out
    parameters = project.parameters()
    assert (project.generated() / parameters["checkpoint"]).resolve() == project.checkpoint
    assert not Path(parameters["checkpoint"]).is_absolute(), "the project can be moved"
    assert parameters["checkpoint_sha256"] == open_checkpoint(project.checkpoint).sha256
    assert parameters["precision"] in ("f32", "bf16")
    assert (project.generated() / parameters["kernel_cache"]).resolve() == project.root / "build" / "kernels"
    assert (project.generated() / "1").is_dir()
    assert (project.generated() / "how_to_call.txt").read_text() == "curl {host}"
    assert project.parameters("generate_unary") == {"forward_to": "generate"}
    config = model_config.read(project.generated() / "config.pbtxt")
    assert config.model_transaction_policy.decoupled
    assert not model_config.read(
        project.generated("generate_unary") / "config.pbtxt"
    ).model_transaction_policy.decoupled


def test_auto_is_resolved(project: Project, machine: Callable[..., None]) -> None:
    for has, settled in ((True, "bf16"), (False, "f32")):
        machine(bf16=has)
        assert project.make("generate")[0] == 0
        assert project.parameters()["precision"] == settled
    file = project.root / "model_repository" / "generate" / "config.pbtxt"
    file.write_text(file.read_text() + "instance_group [ { kind: KIND_GPU } ]")
    for capability, settled in (((8, 0), "bf16"), ((7, 5), "f16")):
        machine(gpus=1, capability=capability)
        assert project.make("generate")[0] == 0
        assert project.parameters()["precision"] == settled


def test_a_gpu_is_taken_by_itself_and_its_memory_planned(project: Project, machine: Callable[..., None]) -> None:
    project.make("generate")
    assert list(json.loads(project.parameters()["device_memory"])) == ["engines", "KV"]
    machine(gpus=2)
    status, out, _ = project.make("generate")
    assert status == 0 and ", bf16, GPU 0, " in out
    config = model_config.read(project.generated() / "config.pbtxt")
    (group,) = config.instance_group
    assert (group.kind, list(group.gpus)) == (group.KIND_GPU, [0])
    parts = json.loads(project.parameters()["device_memory"])
    assert list(parts) == ["engines", "KV", "graphs"] and min(parts.values()) > 0
    project.change(max_concurrency=16)
    project.make("generate")
    halved = json.loads(project.parameters()["device_memory"])
    assert halved["KV"] == pytest.approx(parts["KV"] / 2, abs=0.2) and halved["engines"] == parts["engines"]
    # What is for CPUs stays there, and so does a front that says so.
    for parameters, precision in (({"precision": "int8"}, "int8"), ({"kv_precision": "int8"}, None)):
        project.change(**parameters)
        assert project.make("generate")[0] == 0
        assert precision in (None, project.parameters()["precision"])
        assert "KIND_CPU" in (project.generated() / "config.pbtxt").read_text()
    project.change()
    file = project.root / "model_repository" / "generate" / "config.pbtxt"
    file.write_text(file.read_text() + "instance_group [ { kind: KIND_CPU } ]")
    assert project.make("generate")[0] == 0 and "graphs" not in project.parameters()["device_memory"]


def test_a_model_that_does_not_fit_is_built_and_named(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], machine: Callable[..., None]
) -> None:
    monkeypatch.setattr(capacity, "this_machine", lambda: Machine(2, 100.0))
    project.change(max_concurrency=4096, precision="bf16")
    machine(bf16=True)
    # A token of 2 layers, of 2 heads of 16 elements each: keys and values.
    least_mb = 512 * 2 * 2 * 2 * 16 * 2 / 2**20
    reason = f"max_concurrency: got 4096; at most {int(99.8 / least_mb)} with max_length 512 in 100 MiB (left for it)"
    status, _, error = project.make("generate")
    assert status == 0
    line = "generate does not fit in what is available now, `shapeshift serve` leaves it out"
    assert error == f"{line}: {reason}\n"
    assert main(["validate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"generate: OK, but it does not fit here: {reason}", "generate_unary: OK"]


def test_published_checkpoint_is_checked_again_only_after_a_change(project: Project, compilations: list[Path]) -> None:
    project.change(native="true")
    _, out, error = project.make()
    assert "generate: checked, kernels compiled, logits as transformers'; " in out
    assert re.fullmatch(r"generate: +\d+ s  compiling the kernels: 0 of 4 files\n", error)
    assert project.make()[1].startswith("generate: up to date; ")
    project.change(native="true", max_concurrency=5)
    assert "up to date; checkpoint: small, " in project.make()[1]
    assert project.parameters()["max_concurrency"] == "5"
    assert compilations == [project.root / "build" / "kernels"]
    config = json.loads((project.checkpoint / "config.json").read_text())
    (project.checkpoint / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    assert "generate: checked" in project.make()[1]
    assert len(compilations) == 2


def test_the_tokenizer_of_transformers_is_published_and_served(project: Project) -> None:
    from transformers import AutoTokenizer

    runtime: Any = SimpleNamespace(vocab_size=VOCABULARY, eos_ids=frozenset(), blocks=1, shares_prefixes=False)
    for count in (1, 2, VOCABULARY):
        (project.checkpoint / "added_tokens.json").write_text(
            json.dumps({f"<{own}>": 386 + own for own in range(count)})
        )
        (project.checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": f"{count}"}))
        # A change of any file of the tokenizer is noticed.
        assert "generate: checked" in project.make("generate")[1]
        assert "generate: up to date" in project.make("generate")[1]
        args = ModelArgs("generate", project.generated(), {}, project.parameters(), "CPU", 0)
        loaded = loading.load(args, logger(), lambda *_: runtime)
        library = AutoTokenizer.from_pretrained(project.checkpoint)
        assert loaded.chat.text == f"{count}" == library.chat_template
        assert loaded.tokenizer.encode(b"a <0> b<1>").tolist() == library("a <0> b<1>")["input_ids"]
    # The model has no such token: transformers fails in its embedding.
    with pytest.raises(InvalidInputError, match="text_input: got '<50>'; tokens that the model has: "):
        loaded.tokenizer.encode(b"a <50>")
    (project.generated() / "1" / "tokenizer.json").unlink()
    assert "generate: checked" in project.make("generate")[1]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ""),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", ""),
        ("{{ raise_exception('one turn only') }}", ""),
        # Chats are served to a length, which transformers does not bound.
        (
            "{% for i in range(99999) %}{{ 50 * 'x' }}{% endfor %}",
            f"the chat template makes '' at character 0, and {40 * 'x'!r} by transformers' apply_chat_template",
        ),
    ],
)
def test_a_chat_template_is_rendered_as_transformers_does_or_refused(
    project: Project, template: str, said: str
) -> None:
    (project.checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    status, _, err = project.make("generate")
    assert status == bool(said) and said in err, err


def test_missing_compiler_is_reported(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def library(folder: Path, progress: Callable[[str], None] = print) -> Path:
        raise FileNotFoundError("no g++ found")

    monkeypatch.setattr(native_operations, "library", library)
    project.change(native="true")
    status, out, _ = project.make()
    assert status == 0 and "generate: checked, without compiled kernels (no g++ found)" in out


BROKEN: dict[str, tuple[Callable[[Project], object], str]] = {
    "unknown parameter": (
        lambda project: project.change(max_lenght=5),
        "max_lenght: .*; did you mean max_length. known: ",
    ),
    "a parameter of the model that it forwards to": (
        lambda project: project.change("generate_unary", max_concurrency=2),
        "max_concurrency: got 'max_concurrency'; does not go with forward_to: set it in generate, which generates",
    ),
    "a parameter of models with adapters": (
        lambda project: project.change(adapter_mb=64),
        'adapter_mb: got .adapter_mb.; goes with backend "adapter_cache" only',
    ),
    "a parameter of generated configs": (lambda project: project.change(kernel_cache="x"), "kernel_cache: "),
    "bad value": (lambda project: project.change(max_concurrency=0), "max_concurrency: got 0; 1 to 4096"),
    "ranks that do not divide the heads": (
        lambda project: project.change(tensor_parallel_size=3),
        r"tensor_parallel_size: got 3; a divisor of num_attention_heads \(4\)",
    ),
    "no checkpoint": (lambda project: project.change(checkpoint="absent"), "checkpoint: no folder "),
    "forwards to nobody": (
        lambda project: project.change("generate_unary", forward_to="absent"),
        "forward_to: no model absent in ",
    ),
    "missing tensor": (
        lambda project: _change_config(project, num_hidden_layers=3),
        "num_hidden_layers: got 3; 2: the weights hold so many layers",
    ),
    "unknown family": (lambda project: _change_config(project, model_type="opt"), "model_type: got 'opt'"),
    "another family": (lambda project: _change_config(project, model_type="gpt2"), "n_embd: got None"),
    "quantised": (
        lambda project: _change_config(project, quantization_config={"quant_method": "bitsandbytes"}),
        "quantization_config: got .*awq, gptq, .*, or weights in f32, f16 or bf16: take the checkpoint",
    ),
    "tokenizer of another model": (
        lambda project: _change_tokenizer(project.checkpoint),
        "tokenizer.json: got 'id .*ids below 400, the vocab_size of config.json",
    ),
    "tokens whose text depends on neighbours": (
        lambda project: _change_decoder(project.checkpoint),
        "tokenizer.json: token .* becomes .* its decoder cannot decode token by token",
    ),
    "no weights": (lambda project: (project.checkpoint / "model.safetensors").unlink(), "weights must be"),
    "no tokenizer": (lambda project: (project.checkpoint / "tokenizer.json").unlink(), "must hold tokenizer.json"),
}


def _change_config(project: Project, **changes: object) -> None:
    file = project.checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _change_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<more {number}>" for number in range(400)])
    tokenizer.save(str(folder / "tokenizer.json"))


def _change_decoder(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": {"type": "BPEDecoder", "suffix": "e"}}))


def test_a_tokenizer_with_more_tokens_is_served_where_asked_for(project: Project) -> None:
    _change_tokenizer(project.checkpoint)
    project.change(extra_tokens="true")
    assert project.make("generate")[0] == 0


@pytest.mark.parametrize("kind", BROKEN)
def test_invalid_fronts_are_named_and_not_published(project: Project, kind: str) -> None:
    import re

    damage, said = BROKEN[kind]
    damage(project)
    status, _, err = project.make()
    assert status == 1
    assert re.search(said, err), err
    broken = "generate_unary" if "forwards" in kind else "generate"
    assert not project.generated(broken).exists()


def test_the_number_of_ranks_is_checked_for_a_published_checkpoint_too(project: Project) -> None:
    assert project.make("generate")[0] == 0
    project.change(tensor_parallel_size=4)
    status, _, err = project.make("generate")
    assert status == 1 and "tensor_parallel_size: got 4; a divisor of num_key_value_heads (2)" in err
    project.change(tensor_parallel_size=2)
    assert "up to date" in project.make("generate")[1] and project.parameters()["tensor_parallel_size"] == "2"


def test_failed_check_keeps_the_published_model(project: Project) -> None:
    project.make()
    before = (project.generated() / "config.pbtxt").read_bytes()
    _change_config(project, num_hidden_layers=3)
    status, _, err = project.make()
    assert status == 1 and "not published: generate" in err
    assert (project.generated() / "config.pbtxt").read_bytes() == before


def test_an_unknown_backend_is_named(project: Project) -> None:
    file = project.root / "model_repository" / "generate" / "config.pbtxt"
    file.write_text(file.read_text().replace('"fused_decode"', '"fused"'))
    status, _, err = project.make()
    assert status == 1
    assert "backend: got 'fused'; one of adapter_cache, cascade, fused_decode, polymorph, token_adapt" in err


def test_the_model_that_a_front_forwards_to_is_built_too(project: Project) -> None:
    status, out, err = project.make("generate_unary")
    assert status == 0 and err.splitlines() == ["generate_unary needs generate: building it too"]
    assert out.startswith("generate: checked") and project.generated("generate").is_dir()
    # Nothing is said where it was asked for.
    assert project.make("generate_unary", "generate")[2] == ""


def test_front_that_forwards_to_a_failed_model_is_not_published(project: Project) -> None:
    project.change("generate", checkpoint="absent")
    status, _, err = project.make()
    assert status == 1
    assert "generate_unary: needs generate, which could not be published" in err
    assert "not published: generate, generate_unary" in err
    assert not project.generated("generate_unary").exists()
    # A build of this one alone remembers the other.
    assert "needs generate" in project.make("generate_unary")[2]
    project.change("generate", checkpoint="small")
    assert project.make()[0] == 0


def test_the_folder_of_a_gguf_file_stays_while_a_model_names_it(project: Project) -> None:
    file = project.root / "checkpoints" / "tiny.gguf"
    gguf_models.write(file)
    project.change(checkpoint="tiny.gguf")
    config = model_config.read(project.root / "model_repository" / "generate" / "config.pbtxt")
    other = project.root / "model_repository" / "other"
    other.mkdir()
    config.name = "other"
    model_config.write(config, other / "config.pbtxt")
    assert project.make("generate", "other")[0] == 0
    before = project.checkpoint_of("other")
    # The reader's code changes with an upgrade, the file with a download: a new folder either way.
    gguf_models.write(file, seed=1)
    assert project.make("generate")[0] == 0
    assert project.checkpoint_of("generate") != before == project.checkpoint_of("other")
    assert (before / "config.json").is_file()
    assert project.make("other")[0] == 0
    assert project.checkpoint_of("other") == project.checkpoint_of("generate") and not before.exists()
