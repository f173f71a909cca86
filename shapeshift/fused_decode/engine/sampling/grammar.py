"""Answers that follow a JSON schema, a regular expression or a grammar: which tokens may come next, by llguidance.

A grammar is compiled on a thread of its own; the mask of a request's next token is computed on another one while the
model computes its logits. llguidance cannot be interrupted: what takes too long fails its own request, and the thread
is given up.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.fused_decode.sampling_params import StructuredOutputs
from shapeshift.serving.bounds import Bound, unloading

FIELD = "structured_outputs"
COMPILE_S, MASK_S = 5.0, 1.0
"""Most seconds that a grammar may take to compile, and the mask of a token to be computed."""
# Compilations at once; further requests with new grammars get UNAVAILABLE.
_MOST_COMPILING = 16
_MOST_KEPT = 64

Flags = npt.NDArray[np.bool_]
Compiled = Callable[["Template | Exception"], None]


class Template(NamedTuple):
    """A compiled grammar, and the mask of its first token."""

    matcher: Any
    first: bytes


class MaskThread:
    """Computes masks, one after another, on a thread that is replaced when one of them takes too long.

    Only the generating thread calls the methods.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._running = _Running()
        self._thread: threading.Thread | None = None

    def post(self, grammar: Grammar) -> None:
        """Compute the next mask of `grammar` soon."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_compute_all, args=(self._waiting, self._running), name="grammar-masks", daemon=True
            )
            self._thread.start()
        self._waiting.put(grammar)

    def give_up_late(self) -> None:
        """Fail a grammar whose mask takes too long; what waits behind it is done on a new thread."""
        late, since = self._running.grammar, self._running.since
        if late is None or time.monotonic() - since < MASK_S:
            return
        left, self._waiting = self._waiting, queue.SimpleQueue()
        self._running = _Running()
        self._thread = None
        late.fail(InvalidInputError(FIELD, "a mask", f"a simpler one: a token took more than {MASK_S:g} s"))
        with contextlib.suppress(queue.Empty):
            while (grammar := left.get_nowait()) is not None:
                self.post(grammar)
        left.put(None)

    def close(self) -> None:
        """End the thread when it has done what it has."""
        self._waiting.put(None)


@dataclass
class _Running:
    """What a thread computes, and since when."""

    grammar: Grammar | None = None
    since: float = 0.0


def _compute_all(waiting: queue.SimpleQueue[Grammar | None], running: _Running) -> None:
    while (grammar := waiting.get()) is not None:
        running.since = time.monotonic()
        running.grammar = grammar
        grammar.compute()
        running.grammar = None


class Grammar:
    """The grammar of one answer, as far as it has come. Only the generating thread calls the methods."""

    def __init__(self, template: Template, masks: MaskThread) -> None:
        self._matcher = template.matcher.deep_copy()
        self._mask: bytes | None = template.first
        self._masks = masks
        self._is_ready = threading.Event()
        self._is_ready.set()
        self._failure: Exception | None = None

    def allowed(self, vocab_size: int) -> Flags | None:
        """The tokens that may come next, BOOL [vocab_size]; None where that failed: `accept` then says why."""
        while not self._is_ready.wait(MASK_S):
            self._masks.give_up_late()
        if self._failure is not None or self._mask is None:
            return None
        bits = np.unpackbits(np.frombuffer(self._mask, np.uint8), count=vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def accept(self, token: int) -> bool:
        """Whether `token`, the next one of the answer, completes it. Raises InvalidInputError where that failed."""
        if self._failure is None and not self._matcher.consume_token(token):
            self._failure = _invalid(self._matcher)
        if self._failure is not None:
            raise self._failure
        if self._matcher.is_stopped():
            return True
        self._is_ready.clear()
        self._masks.post(self)
        return False

    def compute(self) -> None:
        """Compute the next mask. Only the masks' thread calls this."""
        try:
            self._mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._failure = _invalid(self._matcher)
        except Exception as error:  # noqa: BLE001  it fails this request; the thread has others to serve
            self._failure = error
        self._is_ready.set()

    def fail(self, error: Exception) -> None:
        """End the answer with `error`: what is being computed is not waited for."""
        self._failure = error
        self._is_ready.set()


class GrammarCompiler:
    """Compiles the grammars of one model's requests and keeps the last ones. Any thread may call its methods.

    tokenizer_file, vocab_size, eos_ids: of the model.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._bound = Bound("grammars", _MOST_COMPILING, "grammars", "are being compiled")
        self._kept: OrderedDict[StructuredOutputs, Template] = OrderedDict()
        self._waiting: dict[StructuredOutputs, list[Compiled]] = {}
        self._tokenizer: Any = None
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._running = 0
        self._masks = MaskThread()

    def new(self, template: Template) -> Grammar:
        """The grammar of one more answer."""
        return Grammar(template, self._masks)

    def compile(self, given: StructuredOutputs, done: Compiled) -> None:
        """Call `done`, now or later on another thread, with the compiled grammar or with the reason for refusing it.

        Raises OverloadedError where too many are being compiled, UnsupportedError without llguidance.
        """
        with self._lock:
            found = self._kept.get(given)
            if found is not None:
                self._kept.move_to_end(given)
            elif given in self._waiting:
                self._waiting[given].append(done)
            else:
                self._bound.require(self._running)
                _require_llguidance()
                self._running += 1
                self._waiting[given] = [done]
                timer = threading.Timer(COMPILE_S, self._finish, (given, _too_slow(given)))
                timer.daemon = True
                thread = threading.Thread(target=self._compile, args=(given, timer), name="grammar", daemon=True)
                timer.start()
                thread.start()
        if found is not None:
            done(found)

    def close(self) -> None:
        """Refuse the requests that wait for a grammar."""
        with self._lock:
            waiting = list(self._waiting)
        for given in waiting:
            self._finish(given, unloading())
        self._masks.close()

    def _compile(self, given: StructuredOutputs, timer: threading.Timer) -> None:
        outcome: Template | Exception
        try:
            outcome = self._template(given)
        except Exception as error:  # noqa: BLE001  whatever it is, the requests that wait are answered with it
            outcome = error
        timer.cancel()
        with self._lock:
            self._running -= 1
        self._finish(given, outcome)

    def _finish(self, given: StructuredOutputs, outcome: Template | Exception) -> None:
        with self._lock:
            waiting = self._waiting.pop(given, [])
            if isinstance(outcome, Template):
                self._kept[given] = outcome
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        for done in waiting:
            done(outcome)

    def _template(self, given: StructuredOutputs) -> Template:
        import llguidance

        with self._making:
            if self._tokenizer is None:
                file = str(self._tokenizer_file)
                try:
                    bare = llguidance.LLTokenizer(file)
                except ValueError as error:
                    said, remedy = str(error).partition(":")[0], "use a byte-level one, or one with byte fallback"
                    raise UnsupportedError(f"{FIELD}: not with this model's tokenizer ({said}); {remedy}") from None
                size = max(bare.vocab_size, self._vocab_size)
                self._tokenizer = llguidance.LLTokenizer(file, n_vocab=size, eos_token=self._eos_ids or None)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        try:
            text = _grammar_text(llguidance, given)
        except ValueError as error:
            raise InvalidInputError(f"{FIELD} {given.kind}", given.text, str(error).partition("\n")[0]) from None
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise _invalid(matcher, given)
        return Template(matcher, first)


def _require_llguidance() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise UnsupportedError(f"{FIELD}: this server lacks llguidance; pip install 'shapeshift[structured]'") from None


def _grammar_text(llguidance: Any, given: StructuredOutputs) -> str:
    """The grammar in the form of llguidance. Raises ValueError."""
    if given.kind == "json":
        overrides = {"whitespace_flexible": False} if given.compact else None
        return str(llguidance.LLMatcher.grammar_from_json_schema(given.text, overrides=overrides))
    return str(llguidance.grammar_from(given.kind, given.text))


def _invalid(matcher: Any, given: StructuredOutputs | None = None) -> InvalidInputError:
    said = matcher.get_error().strip().partition("\n")[0] or "no text is possible"
    # The name of llguidance for a grammar that no text satisfies.
    said = "one that a text can satisfy" if said.startswith("NoExtension") else said
    name = FIELD if given is None else f"{FIELD} {given.kind}"
    return InvalidInputError(name, "a grammar" if given is None else given.text, said)


def _too_slow(given: StructuredOutputs) -> InvalidInputError:
    return InvalidInputError(f"{FIELD} {given.kind}", given.text, f"one that is compiled within {COMPILE_S:g} s")
