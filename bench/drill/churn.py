"""Adapters, tasks and candidates that come and go all the while, as commands change them."""

from __future__ import annotations

import threading
from pathlib import Path

from bench.drill import models, questions
from bench.drill.questions import Question
from bench.drill.traffic import Traffic
from shapeshift.adapter_cache.registry import store
from shapeshift.cascade import candidates
from shapeshift.errors import ShapeshiftError
from shapeshift.registry import Registry
from shapeshift.token_adapt.tasks import registry as tasks

_SOURCE = Path("checkpoints/smollm2-adapters/sentiment")
_NAME, _OF = "coming-and-going", "sentiment"
_TASK = "animal"
_PERIOD_S = 2.0
_PROMPT, _TOKENS = "Once upon a time", 12


class Churn:
    """A context manager. Within the block, a thread changes each registry once in two periods, and back in the next.

    changes: so far. failed: what could not be changed. After each change of the adapters it asks the one that comes
    and goes, which must answer as the one that it is a copy of, or refuse with a code.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.changes = 0
        self.failed: list[str] = []
        self._traffic = traffic
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="churn", daemon=True)
        self._question = Question("generate_lora", questions.prompt_payload("generate_lora", _PROMPT, _TOKENS, _NAME))
        self._copied = Question("generate_lora", questions.prompt_payload("generate_lora", _PROMPT, _TOKENS, _OF))
        self._task = next(entry for entry in tasks.read(models.TASKS) if entry.name == _TASK)

    def __enter__(self) -> Churn:
        store_names = store.read(models.ADAPTERS)
        if _NAME in store_names:
            store.remove(models.ADAPTERS, _NAME)
        self._traffic.run(self._traffic.learn_one(self._copied))
        self._question.right = self._copied.right
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _serve(self) -> None:
        there = True
        while not self._closing.wait(_PERIOD_S):
            there = not there
            for change in (self._change_adapter, self._change_task, self._change_candidate):
                try:
                    change(there)
                    self.changes += 1
                except (ShapeshiftError, OSError) as error:
                    self.failed.append(f"{type(error).__name__}: {error}")
            self._traffic.ask(self._question)

    def _change_adapter(self, there: bool) -> None:
        if there:
            store.remove(models.ADAPTERS, _NAME)
        else:
            store.add(models.ADAPTERS, _NAME, _SOURCE, pinned=False)

    def _change_task(self, there: bool) -> None:
        if there:
            tasks.add(models.TASKS, self._task)
        else:
            with Registry(models.TASKS, tasks.KIND).changing() as content:
                content.entries.pop(_TASK, None)

    def _change_candidate(self, there: bool) -> None:
        serving = candidates.serving(models.CANDIDATES, "clinc150")
        table = serving.table
        same = [one for one in table.candidates if one.levels == serving.candidate.levels]
        candidates.put(models.CANDIDATES, table, same[0 if there else -1].name, pinned=True)
