"""Answers that follow a JSON schema, a regular expression or a grammar: which tokens may come next, by llguidance.

A grammar is compiled on a thread of its own; the mask of a request's next token is computed on another one while the
model computes its logits. Nobody waits for it: where it comes later, the request is left out of the steps until then.
llguidance cannot be interrupted: what takes too long fails its own request, and the thread is given up.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shapeshift.errors import EngineError, InvalidInputError, UnsupportedError
from shapeshift.fused_decode.sampling_params import StructuredOutputs
from shapeshift.serving.bounds import Bound, unloading

FIELD = "structured_outputs"
SLOW_S = 0.01
"""Seconds from which a mask is slow: the next one of its answer is computed apart from quick ones."""
# Compilations at once; further requests with new grammars get UNAVAILABLE.
_MOST_COMPILING = 16
_MOST_KEPT = 64

Flags = npt.NDArray[np.bool_]
Compiled = Callable[["Template | Exception"], None]


class Template(NamedTuple):
    """A compiled grammar, and the mask of its first token."""

    matcher: Any
    first: bytes


class MaskThreads:
    """Computes masks, quick ones one after another on one thread, slow ones on another. Only the generating thread
    calls the methods.

    A computation cannot be interrupted. One that turns out to be slow keeps its thread to itself, and so does a slow
    one that nobody wants any more: what waits behind it is done on a new thread.
    """

    def __init__(self) -> None:
        self._workers = [_Worker(), _Worker()]

    def post(self, work: Grammar) -> None:
        """Compute `work` soon."""
        self._workers[work.is_slow].post(work)

    def watch(self, now: float) -> None:
        """Let nothing wait behind what keeps a thread for too long. To be called while a mask is awaited."""
        for place, worker in enumerate(self._workers):
            if worker.running is None:
                continue
            work, start = worker.running
            if now - start >= SLOW_S and (not place or work.is_ended):
                self._workers[place] = worker.relieved()

    def close(self) -> None:
        """End the threads when they have done what they have."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """A thread, from its first work on. running: what it computes, and since when; None: it waits."""

    def __init__(self) -> None:
        self.running: tuple[Grammar, float] | None = None
        self._waiting: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._has_begun = False

    def post(self, work: Grammar) -> None:
        self._waiting.put(work)
        if not self._has_begun:
            threading.Thread(target=self._compute_all, name="masks", daemon=True).start()
            self._has_begun = True

    def relieved(self) -> _Worker:
        """Another one with what waits; this one ends with what it computes."""
        other = _Worker()
        with contextlib.suppress(queue.Empty):
            while (work := self._waiting.get_nowait()) is not None:
                other.post(work)
        self.close()
        return other

    def close(self) -> None:
        self._waiting.put(None)

    def _compute_all(self) -> None:
        while (work := self._waiting.get()) is not None:
            start = time.monotonic()
            self.running = work, start
            work.began = start
            error: BaseException | None = None
            try:
                work.compute()
            except BaseException as raised:  # noqa: BLE001  not even a panic in Rust may end the thread
                error = raised
            self.running = None
            work.done(time.monotonic() - start, error)


class Grammar:
    """The grammar of one answer, as far as it has come. Only the generating thread calls the methods.

    is_ready  whether the mask of the next token is there
    is_slow   whether the last mask was slow
    is_ended  whether nobody wants a further mask
    began     since when a thread computes the next mask; 0: none does
    masks_s   most seconds that the masks of one answer may take, together
    """

    masks_s = 10.0

    def __init__(self, template: Template, threads: MaskThreads, ready: Callable[[], None]) -> None:
        """ready: called on another thread when a mask is there."""
        self.matcher = template.matcher.deep_copy()
        self._mask = template.first
        self._threads = threads
        self._ready = ready
        self._seconds = self.began = 0.0
        self._is_new = False
        self.is_ready, self.is_slow, self.is_ended = True, False, False
        self._failure: Exception | None = None

    @property
    def may_join(self) -> bool:
        """Whether the answer may be in the next step, at the end of which its mask is there, or may well be."""
        return self.is_ready or (self._is_new and not self.is_slow)

    def sit_out(self) -> None:
        """A step had no use for the answer: until its mask is there, it is in none."""
        self._is_new = False

    def allowed(self, vocab_size: int) -> Flags | None:
        """The tokens that may come next, BOOL [vocab_size]; None where that is not known yet."""
        if not self.is_ready:
            return None
        bits = np.unpackbits(np.frombuffer(self._mask, np.uint8), count=vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def accept(self, token: int) -> bool:
        """Whether `token`, the next one of the answer, completes it. Raises InvalidInputError where that failed."""
        if not self.matcher.consume_token(token):
            raise _invalid(self.matcher)
        if self.matcher.is_stopped():
            return True
        self.is_ready, self._is_new = False, True
        self._threads.post(self)
        return False

    def failure(self, now: float) -> Exception | None:
        """Why the answer cannot go on; None: it can."""
        if not self.is_ready:
            self._threads.watch(now)
        began = self.began
        if self._seconds + (now - began if began else 0.0) > self.masks_s:
            limit = f"a simpler one: the masks of an answer may take {self.masks_s:g} s together, and these took longer"
            return InvalidInputError(FIELD, "a grammar", limit)
        return self._failure

    def end(self) -> None:
        """The answer has ended."""
        self.is_ended = True

    def compute(self) -> None:
        """Compute the next mask. A mask thread calls this."""
        if not self.is_ended:
            self._mask = self.matcher.compute_bitmask()

    def done(self, seconds: float, error: BaseException | None) -> None:
        """`compute` took so long, and failed with `error` if there is one. A mask thread calls this."""
        self.began = 0.0
        self._seconds += seconds
        self.is_slow = seconds >= SLOW_S
        if error is not None:
            self._failure = EngineError(f"{FIELD}: what may follow could not be computed: {error}")
        elif self.matcher.is_error():
            self._failure = _invalid(self.matcher)
        self.is_ready = self._failure is None
        self._ready()


class GrammarCompiler:
    """Compiles the grammars of one model's requests and keeps the last ones. Any thread may call its methods.

    tokenizer_file, vocab_size, eos_ids: of the model.
    running: grammars that are being compiled; compile_s: most seconds that one may take.
    """

    compile_s = 5.0
    grammar_type = Grammar

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._bound = Bound("grammars", _MOST_COMPILING, "grammars", "are being compiled")
        self._templates: OrderedDict[StructuredOutputs, Template] = OrderedDict()
        self._waiting: dict[StructuredOutputs, list[Compiled]] = {}
        self._tokenizer: Any = None
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self.running = 0
        self._masks = MaskThreads()

    def new(self, template: Template, ready: Callable[[], None]) -> Grammar:
        """The grammar of one more answer; ready: see `Grammar`."""
        return self.grammar_type(template, self._masks, ready)

    def compile(self, outputs: StructuredOutputs, done: Compiled) -> None:
        """Call `done`, now or later on another thread, with the compiled grammar or with the reason for refusing it.

        Raises OverloadedError where too many are being compiled, UnsupportedError without llguidance.
        """
        with self._lock:
            template = self._templates.get(outputs)
            if template is not None:
                self._templates.move_to_end(outputs)
            elif outputs in self._waiting:
                self._waiting[outputs].append(done)
            else:
                self._bound.require(self.running)
                _require_llguidance()
                self.running += 1
                self._waiting[outputs] = [done]
                timer = threading.Timer(self.compile_s, self._finish, (outputs, _too_slow(outputs, self.compile_s)))
                timer.daemon = True
                thread = threading.Thread(target=self._compile, args=(outputs, timer), name="grammar", daemon=True)
                timer.start()
                thread.start()
        if template is not None:
            done(template)

    def close(self) -> None:
        """Refuse the requests that wait for a grammar."""
        with self._lock:
            waiting = list(self._waiting)
        for outputs in waiting:
            self._finish(outputs, unloading())
        self._masks.close()

    def _compile(self, outputs: StructuredOutputs, timer: threading.Timer) -> None:
        outcome: Template | Exception
        try:
            outcome = self.template(outputs)
        except Exception as error:  # noqa: BLE001  whatever it is, the requests that wait are answered with it
            outcome = error
        timer.cancel()
        with self._lock:
            self.running -= 1
        self._finish(outputs, outcome)

    def _finish(self, outputs: StructuredOutputs, outcome: Template | Exception) -> None:
        with self._lock:
            waiting = self._waiting.pop(outputs, [])
            if isinstance(outcome, Template):
                self._templates[outputs] = outcome
                if len(self._templates) > _MOST_KEPT:
                    self._templates.popitem(last=False)
        for done in waiting:
            done(outcome)

    def template(self, outputs: StructuredOutputs) -> Template:
        """`outputs` compiled, at once. Raises InvalidInputError and UnsupportedError."""
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
            text = _grammar_text(llguidance, outputs)
        except ValueError as error:
            raise InvalidInputError(f"{FIELD} {outputs.kind}", outputs.text, str(error).partition("\n")[0]) from None
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise _invalid(matcher, outputs)
        return Template(matcher, first)


def _require_llguidance() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise UnsupportedError(f"{FIELD}: this server lacks llguidance; pip install 'shapeshift[structured]'") from None


def _grammar_text(llguidance: Any, outputs: StructuredOutputs) -> str:
    """The grammar in the form of llguidance. Raises ValueError."""
    if outputs.kind == "json":
        overrides = {"whitespace_flexible": False} if outputs.compact else None
        return str(llguidance.LLMatcher.grammar_from_json_schema(outputs.text, overrides=overrides))
    return str(llguidance.grammar_from(outputs.kind, outputs.text))


def _invalid(matcher: Any, outputs: StructuredOutputs | None = None) -> InvalidInputError:
    said = matcher.get_error().strip().partition("\n")[0] or "no text is possible"
    # The name of llguidance for a grammar that no text satisfies.
    said = "one that a text can satisfy" if said.startswith("NoExtension") else said
    name = FIELD if outputs is None else f"{FIELD} {outputs.kind}"
    return InvalidInputError(name, "a grammar" if outputs is None else outputs.text, said)


def _too_slow(outputs: StructuredOutputs, most_s: float) -> InvalidInputError:
    return InvalidInputError(f"{FIELD} {outputs.kind}", outputs.text, f"one that is compiled within {most_s:g} s")
