"""Answers that follow a grammar, from the request to the text."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.engine.detokenize import token_bytes
from shapeshift.fused_decode.engine.sampling import grammar
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.sampling_params import StructuredOutputs
from tests.fakes import PbUtils, Request, TritonError, values_of
from tests.fused_decode.fronts import MakeFront, answer_of, ask
from tests.fused_decode.small_tokenizers import KINDS
from tests.fused_decode.toy import LETTERS, VOCABULARY, Run, ToyRuntime, ids, text_of
from tests.waiting import wait_for

DATE = {"regex": r"[0-9]{4}, [A-Z][a-z]{2}"}


def structured(prompt: str = "abc", **given: Any) -> Request:
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "return_finish_reason": True, **given}
    fields["structured_outputs"] = json.dumps(fields["structured_outputs"])
    return ask(prompt, **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_match_as_a_whole_and_end_there(make_front: MakeFront, stream: bool) -> None:
    front = make_front()
    requests = [structured(structured_outputs=DATE, seed=seed, stream=stream) for seed in range(12)]
    front.execute(requests)
    texts = []
    for request in requests:
        values = [values_of(response) for response in request.sender.stream()]
        texts.append(b"".join(each["text_output"][0] for each in values).decode())
        assert values[-1]["finish_reason"].tolist() == [b"stop"]
        assert re.fullmatch(DATE["regex"], texts[-1]), texts[-1]
    assert len(set(texts)) == 12


def test_other_requests_are_not_touched_and_mates_change_nothing(make_front: MakeFront, toy: ToyRuntime) -> None:
    front = make_front()
    alone = structured(structured_outputs=DATE, seed=1)
    front.execute([alone])
    text = answer_of(alone)["text_output"]
    again = structured(structured_outputs=DATE, seed=1, ignore_eos=True)
    plain = ask("hello", max_tokens=20)
    front.execute([structured(structured_outputs={"regex": "[a-z]+Q"}, seed=2), again, plain])
    assert answer_of(again)["text_output"] == text
    assert answer_of(plain)["text_output"] == toy.text(ids("hello"), 20)


def test_choices_grammars_and_samples(make_front: MakeFront) -> None:
    front = make_front()
    words = ["yes", "no", "maybe so"]
    choice = structured(structured_outputs={"choice": words}, n=6, seed=1, temperature=9.0)
    lark = structured(structured_outputs={"grammar": 'start: "a" ("b" | "c") "!"'}, seed=3)
    gbnf = structured(structured_outputs={"grammar": 'root ::= "a" ("b" | "c") "!"'}, seed=3)
    given = {"structured_outputs": DATE, "temperature": 1.0, "max_tokens": 40, "min_tokens": 0}
    vllm = ask(None, text_input="abc", sampling_parameters=json.dumps(given))
    older = {"guided_decoding": json.dumps({"choice": words, "json": None, "disable_fallback": False})}
    triton = ask(None, text_input="abc", sampling_parameters=json.dumps(older))
    cut = structured(structured_outputs={"regex": "[a-z]{30}"}, max_tokens=5)
    front.execute([choice, lark, gbnf, vllm, triton, cut])
    texts = [text.decode() for text in values_of(choice.sender.answer())["text_output"]]
    assert {*texts} <= {*words} and len({*texts}) > 1
    for request in (lark, gbnf):
        assert answer_of(request)["text_output"] in ("ab!", "ac!")
    assert re.fullmatch(DATE["regex"], answer_of(vllm)["text_output"])
    assert answer_of(triton)["text_output"] in words
    assert answer_of(cut)["finish_reason"] == "length" and re.fullmatch("[a-z]{5}", answer_of(cut)["text_output"])


SATISFIED_BY_NOTHING = {"type": "string", "minLength": 5, "maxLength": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": SATISFIED_BY_NOTHING}, 'structured_outputs json: got \'{"type": "string", '),
    ({"json": "{"}, "structured_outputs json: got '{'; "),
    ({"json": {"$ref": "#"}}, 'structured_outputs json: got \'{"$ref": "#"}\'; one that a text can satisfy'),
    ({"json": {"type": "object", "properties": {"a": {"$ref": "#", "type": "object"}}}}, "circular references"),
    ({"json": False, "regex": None}, "structured_outputs: got []; one of json, json_object, regex, choice, grammar"),
    ({"json": {}, "regex": "a"}, "structured_outputs: got ['json', 'regex']; one of json, "),
    ({"structural_tag": "a"}, "structured_outputs: got ['structural_tag']; one of json, "),
    ({"regex": "[a-z"}, "structured_outputs regex: got '[a-z'; "),
    ({"regex": r"[^\s\S]"}, r"structured_outputs regex: got '[^\\s\\S]'; one that a text can satisfy"),
    ({"regex": 5}, "structured_outputs regex: got 5; a text"),
    ({"regex": "a" * 65537}, "structured_outputs regex: got '65537 characters'; at most 65536"),
    ({"grammar": "start: foo"}, "structured_outputs grammar: got 'start: foo'; "),
    ({"choice": []}, "structured_outputs choice: got []; a list of at least 1 values"),
]


def test_an_invalid_grammar_costs_no_other(make_front: MakeFront, toy: ToyRuntime, pb_utils: PbUtils) -> None:
    front = make_front()
    good = ask("first")
    # One after another: so many new grammars at once are refused for another reason.
    for given, message in REFUSED:
        request = structured(structured_outputs=given, n=2)
        front.execute([request])
        error = request.sender.answer().error()
        assert error is not None, message
        assert error.code() == TritonError.INVALID_ARG and message in error.message(), error.message()
    both = structured(structured_outputs=DATE, min_tokens=3)
    front.execute([both, good])
    assert both.refusal()[1] == "min_tokens: got 3; 0 with structured_outputs"
    assert answer_of(good)["text_output"] == toy.text(ids("first"), 8)
    wait_for(lambda: not front.live)


def compile_with(front: GenerateFront, compiler: type[grammar.GrammarCompiler]) -> None:
    runtime = front.loaded.runtime
    front.grammars = compiler(front.loaded.tokenizer_file, runtime.vocab_size, runtime.eos_ids)


def test_a_grammar_that_takes_too_long_costs_no_other(make_front: MakeFront, toy: ToyRuntime) -> None:
    gate = threading.Event()

    class SlowCompiler(grammar.GrammarCompiler):
        compile_s = 0.05

        def template(self, outputs: StructuredOutputs) -> grammar.Template:
            assert gate.wait(120)
            return super().template(outputs)

    front = make_front()
    compile_with(front, SlowCompiler)
    late = [structured(structured_outputs={"regex": f"a{{{count}}}"}) for count in range(3, 19)]
    good, more = ask("first"), structured(structured_outputs={"regex": "b"})
    front.execute([*late, more, good])
    assert answer_of(good)["text_output"] == toy.text(ids("first"), 8)
    code, text = more.refusal()
    assert code == TritonError.UNAVAILABLE and "grammars: 16 grammars are being compiled" in text
    for request in late:
        code, text = request.refusal()
        assert code == TritonError.INVALID_ARG and text.endswith("one that is compiled within 0.05 s")
    gate.set()
    wait_for(lambda: front.grammars.running == 0)
    again = structured(structured_outputs={"regex": "a{3}"})
    front.execute([again])
    assert answer_of(again)["text_output"] == "aaa"


def test_a_stuck_mask_costs_no_other_and_its_answer_ends(make_front: MakeFront, toy: ToyRuntime) -> None:
    gate = threading.Event()

    class SlowGrammar(grammar.Grammar):
        def compute(self) -> None:
            if self.matcher.is_accepting():
                assert gate.wait(120)
            super().compute()

    class Compiler(grammar.GrammarCompiler):
        grammar_type = SlowGrammar

    front = make_front()
    compile_with(front, Compiler)
    late, good = (structured(structured_outputs={"regex": given}) for given in ("aab*", "[a-z]{20}"))
    plain = ask("first", max_tokens=20)
    front.execute([late, good, plain])
    assert answer_of(plain)["text_output"] == toy.text(ids("first"), 20)
    assert re.fullmatch("[a-z]{20}", answer_of(good)["text_output"])
    SlowGrammar.masks_s = 0.05
    code, text = late.refusal()
    assert code == TritonError.INVALID_ARG and "the masks of an answer may take 0.05 s together" in text
    gate.set()


def test_a_mask_that_fails_costs_no_other(make_front: MakeFront, toy: ToyRuntime) -> None:
    class Panic(BaseException):
        """As those of Rust, which are no Exception."""

    class FailingGrammar(grammar.Grammar):
        def compute(self) -> None:
            if self.matcher.is_accepting():
                raise Panic("no memory")
            super().compute()

    class Compiler(grammar.GrammarCompiler):
        grammar_type = FailingGrammar

    front = make_front()
    compile_with(front, Compiler)
    lost, good = (structured(structured_outputs={"regex": given}) for given in ("aab*", "[a-z]{20}"))
    plain = ask("first", max_tokens=20)
    front.execute([lost, good, plain])
    error = lost.sender.answer().error()
    assert error is not None and "what may follow could not be computed: no memory" in error.message()
    assert answer_of(plain)["text_output"] == toy.text(ids("first"), 20)
    assert re.fullmatch("[a-z]{20}", answer_of(good)["text_output"])


class Anything:
    """A matcher that allows every token. `gates` hold the masks after so many tokens."""

    def __init__(self, gates: dict[int, threading.Event], every: bytes | None = None) -> None:
        """every: the mask of all tokens; None: of the toy's."""
        self.gates, self.every = gates, every or ALL
        self.accepted = 0

    def deep_copy(self) -> Anything:
        return self

    def consume_token(self, token: int) -> bool:
        self.accepted += 1
        return True

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False

    def compute_bitmask(self) -> bytes:
        gate = self.gates.get(self.accepted)
        assert gate is None or gate.wait(30)
        return self.every


ALL = bytes([255] * (VOCABULARY // 8 + 1))


def with_grammar(run: Run, gates: dict[int, threading.Event], **fields: Any) -> Any:
    """A running request whose grammar allows everything."""
    made = run.request("hello", **fields)
    made.grammar = grammar.Grammar(grammar.Template(Anything(gates), ALL), grammar.MaskThreads(), lambda: None)
    run.loop.submit(made)
    return made


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_whose_mask_is_not_there_sits_out_and_goes_on(ahead: bool) -> None:
    run = Run(ToyRuntime(slots=3, ahead=ahead))
    gate = threading.Event()
    slow = with_grammar(run, {3: gate}, max_tokens=20, logprobs=2)
    mate = run.submit("first", max_tokens=30)
    while not mate.is_finished:
        wait_for(lambda: slow.grammar.is_ready or slow.generated == 3)
        run.loop.step()
        run.loop.check_integrity()
    assert slow.generated == 3 and text_of(mate) == run.runtime.text(ids("first"), 30)
    # The prompt, two tokens, and for each of these masks at most one step during which it might have come.
    assert sum(slow.slot in slots for slots, _ in run.runtime.steps) <= 6
    assert not run.loop.step(), "nothing waits for it"
    gate.set()
    wait_for(lambda: slow.grammar.is_ready)
    while not slow.is_finished:
        run.loop.step()
        run.loop.check_integrity()
    assert text_of(slow) == run.runtime.text(ids("hello"), 20) and len(slow.logprobs) == 20


def test_a_mask_that_comes_during_the_step_costs_no_iteration() -> None:
    runtime = ToyRuntime(slots=3)
    run = Run(runtime)
    quick = with_grammar(run, {}, max_tokens=20)
    runtime.before = lambda: wait_for(lambda: quick.grammar.is_ready)
    assert run.until_idle() == 20 and text_of(quick) == runtime.text(ids("hello"), 20)


def test_a_preempted_row_waits_for_its_mask() -> None:
    run = Run(ToyRuntime(slots=3), prefill_tokens=4)
    gate = threading.Event()
    slow = with_grammar(run, {3: gate}, max_tokens=20)
    while slow.generated < 3:
        run.loop.step()
    run.loop.slots.preempt(slow)
    run.loop.admission.preempted(slow)
    while run.loop.step():
        run.loop.check_integrity()
    assert slow.slot is not None and slow.generated == 3
    gate.set()
    wait_for(lambda: slow.grammar.is_ready)
    while not slow.is_finished:
        run.loop.step()
    assert text_of(slow) == run.runtime.text(ids("hello"), 20)


def test_without_llguidance(make_front: MakeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    front = make_front()
    request = structured(structured_outputs=DATE)
    front.execute([request])
    code, text = request.refusal()
    assert code == TritonError.UNSUPPORTED and text.startswith("structured_outputs: this server lacks llguidance")
    wait_for(lambda: not front.live)


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "unigram"])
def test_tokens_have_the_text_of_answers(tmp_path: Path, kind: str) -> None:
    """Added tokens too, such as those of spaces."""
    file = tmp_path / "tokenizer.json"
    KINDS[kind]().save(str(file))
    table = token_bytes(file)
    compiler = grammar.GrammarCompiler(file, len(table), [0])
    mask = compiler.new(compiler.template(StructuredOutputs("regex", "[ \t]{1,12}")), lambda: None).allowed(len(table))
    assert mask is not None
    wanted = [token for token, own in enumerate(table) if re.fullmatch(b"[ \t]{1,12}", own)]
    assert mask.nonzero()[0].tolist() == wanted and len(wanted) >= 3


def test_a_tokenizer_that_llguidance_does_not_read_is_named(tmp_path: Path) -> None:
    KINDS["metaspace"]().save(str(tmp_path / "tokenizer.json"))
    compiler = grammar.GrammarCompiler(tmp_path / "tokenizer.json", 11, [0])
    with pytest.raises(UnsupportedError, match="structured_outputs: not with this model's tokenizer .* byte-level"):
        compiler.template(StructuredOutputs("regex", "a"))


def test_requests_that_wait_for_a_grammar_are_answered_when_the_model_is_unloaded(make_front: MakeFront) -> None:
    gate = threading.Event()

    class StuckCompiler(grammar.GrammarCompiler):
        def template(self, outputs: StructuredOutputs) -> grammar.Template:
            gate.wait(30)
            raise AssertionError

    front = make_front()
    compile_with(front, StuckCompiler)
    request = structured(structured_outputs=DATE)
    front.execute([request])
    front.close()
    assert request.refusal()[0] == TritonError.UNAVAILABLE
    gate.set()


def test_json_follows_its_schema(make_front: MakeFront, toy: ToyRuntime) -> None:
    """The toy has no braces and quotes: a number and a list of numbers are what its letters can say."""
    assert "," in LETTERS and "[" not in LETTERS
    front = make_front()
    schema = {"type": "integer", "minimum": 10, "maximum": 9999}
    whole = [
        structured(structured_outputs={"json": given, "disable_any_whitespace": True}, seed=seed)
        for seed in range(5)
        for given in (schema, json.dumps(schema))
    ]
    for start in range(0, len(whole), 2):
        front.execute(whole[start : start + 2])
    numbers = [json.loads(answer_of(request)["text_output"]) for request in whole]
    assert all(10 <= number <= 9999 for number in numbers) and numbers[::2] == numbers[1::2]
