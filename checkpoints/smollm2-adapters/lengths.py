"""Train the predictor of answer lengths: `.venv/bin/python checkpoints/smollm2-adapters/lengths.py`.

SmolLM2 answers 2,020 messages alone and 960 with the adapters, greedily, in our decode loop: texts of CLINC150 and
SST-2, those of the adapters' tasks, and instructions from templates. Before it comes `make engines
MODELS=generate_lora`. Writes lengths.npy (`predictor_weights`), lengths.tsv, the answers that are held out, and
lengths.json, how well they are predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
sys.path.insert(0, str(PROJECT))

from shapeshift.kernels import kernel_build  # noqa: E402

# Before torch is imported.
kernel_build.limit_spinning()

import numpy as np  # noqa: E402
from google.protobuf import json_format  # noqa: E402
from tasks import TASKS  # noqa: E402

from shapeshift.adapter_cache.lora import native  # noqa: E402
from shapeshift.adapter_cache.lora.batch import LoraHook, shifted  # noqa: E402
from shapeshift.adapter_cache.memory.adapter_table import make_adapter  # noqa: E402
from shapeshift.adapter_cache.memory.loader import load_weights  # noqa: E402
from shapeshift.adapter_cache.policy.length_prediction import (  # noqa: E402
    PredictionInput,
    RunningMean,
    WordRegressor,
)
from shapeshift.adapter_cache.policy.size_queues import RecentRequests, RequestCost, SizeQueues  # noqa: E402
from shapeshift.adapter_cache.registry import peft  # noqa: E402
from shapeshift.adapter_cache.settings import AdapterCacheSettings  # noqa: E402
from shapeshift.fused_decode import loading  # noqa: E402
from shapeshift.fused_decode.engine.detokenize import TextStream  # noqa: E402
from shapeshift.fused_decode.engine.loop import DecodeLoop  # noqa: E402
from shapeshift.fused_decode.model.architecture import Architecture  # noqa: E402
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed  # noqa: E402
from shapeshift.fused_decode.request import Request  # noqa: E402
from shapeshift.fused_decode.sampling_params import SamplingParams  # noqa: E402
from shapeshift.serving import model_args  # noqa: E402
from shapeshift.triton import model_config  # noqa: E402

MOST_TOKENS = 256
NEAR = 1.5
"""A prediction is near within this factor."""
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
SUBJECTS = """volcanoes;the moon;bicycles;honey bees;the French Revolution;photosynthesis;black holes;chess;coffee;
glaciers;the human heart;earthquakes;the Roman Empire;vaccines;whales;democracy;the stock market;steam engines;dreams;
rainbows;antibiotics;the Silk Road;jazz music;recycling;gravity;penguins;bread;electric cars;the internet;tides;owls;
inflation;the Great Wall of China;yoga;dinosaurs;batteries;the Olympic Games;mushrooms;airplanes;deserts;trees;
a lost key;a brave knight;a small village;an old clock;two friends;a robot;the sea;winter;a birthday party;libraries;
soap;maps;tea;spiders;the Sun;clouds;friendship;sleep;money""".replace("\n", "").split(";")
INSTRUCTIONS = """Write a list of {n} facts about {t}.
List {n} things that have to do with {t}.
Give me {n} ideas for a talk about {t}.
Explain {t} to a child.
Explain in detail what you know about {t}.
How would you describe {t}?
Describe {t} in one word.
In one sentence, what is special about {t}?
Name one thing that goes with {t}. Answer with one word.
Is {t} a good subject for a book? Answer yes or no.
Write a story about {t}.
Write a short poem about {t}.
Tell me a story of two sentences about {t}.
Translate to French: I like {t}.
How do you say "{t}" in Spanish?
Translate into German: Tomorrow we talk about {t}.
Write a Python function that prints a text about {t}.
Write a Python class for {t}.
Write one line of Python that prints "{t}".
Correct the spelling: i likes {t} verry much
Write this in capital letters: {t}
Give another word for {t}.""".splitlines()
NEW_INSTRUCTIONS = """Write an email to a friend about {t}.
Write a headline of a news article on {t}.
Give me three keywords for {t}, separated by commas.
Write a dialogue between a teacher and a pupil about {t}.
What question would you ask an expert on {t}?
Summarize the history of {t} in a few words.""".splitlines()
"""Nothing is trained on these."""


@dataclass(frozen=True)
class Answer:
    """A message and the tokens of its answer. part: train, test, or new for instructions of another kind."""

    adapter: str | None
    part: str
    text: str
    prompt_tokens: int = 0
    tokens: int = 0

    def input(self) -> PredictionInput:
        return PredictionInput(self.adapter, self.prompt_tokens, MOST_TOKENS, text=CHAT.format(self.text).encode())


def main() -> None:
    """Generate, or read, the answers; train and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    data = Path(os.environ.get("SHAPESHIFT_DATA", PROJECT.parent / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=data, help="folder with sst2/ and clinc150/")
    parser.add_argument("--model", type=Path, default=PROJECT / "build" / "repository" / "generate_lora")
    parser.add_argument("--answers", type=Path, default=PROJECT / "build" / "smollm2-answers.json")
    options = parser.parse_args()
    if not options.answers.exists():
        options.answers.write_text(json.dumps([asdict(one) for one in generate(options.model, messages(options.data))]))
    answers = [Answer(**fields) for fields in json.loads(options.answers.read_text())]
    train, test, new = ([one for one in answers if one.part == part] for part in ("train", "test", "new"))
    alone = [one for one in train if one.adapter is None]
    words = WordRegressor.train([one.input().text for one in alone], [one.tokens for one in alone])
    words.save(HERE / "lengths.npy")
    mean = RunningMean()
    for one in train:
        mean.learn(one.input(), one.tokens)
        words.learn(one.input(), one.tokens)
    lines = [f"{one.adapter or ''}\t{one.prompt_tokens}\t{one.tokens}\t{words.predict(one.input())}" for one in test]
    (HERE / "lengths.tsv").write_text("\n".join(["adapter\tprompt\tanswer\tpredicted", *lines]) + "\n")
    queues = size_queues(test)
    predictors: dict[str, Callable[[Sequence[Answer]], list[int]]] = {
        "words": lambda asked: [words.predict(one.input()) for one in asked],
        "mean of the adapter": lambda asked: [mean.predict(one.input()) for one in asked],
        "prompt's tokens": lambda asked: [one.prompt_tokens for one in asked],
        "max_tokens": lambda asked: [MOST_TOKENS for _ in asked],
    }
    groups = {
        "new messages": test,
        "without an adapter": [one for one in test if one.adapter is None],
        "new kinds of instructions": new,
    }
    results = {
        group: {name: judge(predict(asked), asked, queues) for name, predict in predictors.items()}
        for group, asked in groups.items()
    }
    adapted = [one for name in TASKS for one in answers if one.adapter == name]
    results["new adapters"] = {
        name: judge([guess for adapter in TASKS for guess in as_new(adapter, answers, learns)], adapted, queues)
        for name, learns in (("mean of the adapter", True), ("mean of the others", False))
    } | {name: judge(predictors[name](adapted), adapted, queues) for name in ("prompt's tokens", "max_tokens")}
    text = json.dumps(results, indent=2)
    print(text)
    (HERE / "lengths.json").write_text(text + "\n")


def messages(data: Path) -> list[Answer]:
    """What is asked: of each kind a part to train on, and another for the test."""
    rng = random.Random(7)
    subjects = SUBJECTS[:]
    rng.shuffle(subjects)
    seen, unseen = subjects[:40], subjects[40:]
    clinc = json.loads((data / "clinc150" / "data_full.json").read_text(encoding="utf-8"))
    asked: list[tuple[str | None, str, str]] = []
    for part, of_part, counts in (("train", seen, (400, 150, 600)), ("test", unseen, (200, 60, 250))):
        texts = [text for text, _ in rng.sample(clinc[part], counts[0])]
        texts += [text for text, _ in rng.sample(clinc[f"oos_{part}"], 60)]
        lines = (data / "sst2" / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
        texts += [line.rsplit("\t", 1)[0] for line in rng.sample(lines, counts[1])]
        texts += instructions(INSTRUCTIONS, of_part, rng)[: counts[2]]
        asked += [(None, part, text) for text in texts]
    asked += [(None, "new", text) for text in instructions(NEW_INSTRUCTIONS, unseen, rng)]
    for name, read in TASKS.items():
        task = read(data, random.Random(0))
        train, test = ([text for text, _ in pairs] for pairs in (rng.sample(task.train, 120), task.held_out[:80]))
        asked += [(name, "train", text) for text in train[:100]] + [(name, "test", text) for text in test[:60]]
        if name in ("clock", "booking", "module"):
            # What the base alone says to these; the others' messages are there already.
            asked += [(None, "train", text) for text in train[100:]] + [(None, "test", text) for text in test[60:]]
    rng.shuffle(asked)
    return [Answer(*one) for one in asked]


def instructions(forms: Sequence[str], subjects: Sequence[str], rng: random.Random) -> list[str]:
    """Each form of each subject, in random order."""
    made = [form.format(t=subject, n=rng.choice((3, 5, 10))) for form in forms for subject in subjects]
    rng.shuffle(made)
    return made


def generate(model: Path, asked: Sequence[Answer]) -> list[Answer]:
    """The answers, 48 at once, of the built model and the adapters of this folder."""
    config = model_config.read(model / "config.pbtxt")
    for name, value in {"max_concurrency": "48", "kv_cache_tokens": "0"}.items():
        model_config.set_parameter(config, name, value)
    args = model_args.read(
        {
            "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
            "model_name": model.name,
            "model_repository": str(model),
            "model_version": "1",
            "model_instance_name": model.name,
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )
    load = partial(loading.load_runtime, extra_bytes=16 << 20)
    base = loading.load(args, print, load, (AdapterCacheSettings,))  # type: ignore[arg-type]
    add_adapters(base)
    ended: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def deliver(requests: Sequence[Request]) -> None:
        for request in requests:
            if request.is_finished:
                ended.put(request)

    waiting: FirstComeFirstServed[Request] = FirstComeFirstServed(len(asked))
    loop = DecodeLoop(base.runtime, waiting, deliver, print, pool=base.pool)
    loop.start()
    params = SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0)
    for number, one in enumerate(asked):
        prompt = np.array(base.tokenizer.encode_piece(CHAT.format(one.text)), np.int64)
        request = Request(str(number), prompt, params, TextStream(base.token_bytes), max_length=512)
        if one.adapter:
            request.adapter_id = list(TASKS).index(one.adapter)
        loop.submit(request)
    answers = list(asked)
    for count in range(len(asked)):
        request = ended.get()
        if request.error is not None:
            raise request.error
        one = asked[int(request.id)]
        answers[int(request.id)] = Answer(one.adapter, one.part, one.text, len(request.prompt), request.generated)
        if count % 100 == 0:
            print(f"{count} answers", flush=True)
    loop.close()
    return answers


def add_adapters(base: loading.Loaded) -> None:
    """The n-th of TASKS is the adapter with the number n."""
    runtime: Any = base.runtime
    kernels = native.load(base.kernel_cache, print)
    assert kernels is not None, "the CPU's native kernels are needed"
    architecture = Architecture.read(base.folder)
    fits = peft.BaseModel.of_decoder(architecture, {"SmolLM2-135M-Instruct"}, 64, base.folder)
    places, start = [], runtime.blocks * runtime.block_elements
    for name in TASKS:
        adapter = make_adapter(name, "0", peft.read(HERE / name, fits), runtime.memory.element_size())
        adapter.verified = True
        load_weights(runtime.memory[start : start + adapter.elements], adapter, kernels.store)
        places.append(shifted(adapter.relative, start))
        start += adapter.elements
    runtime.linear_hook = LoraHook(runtime.memory, lambda numbers: ([places[at] for at in numbers], 0), kernels)


def as_new(name: str, answers: Sequence[Answer], learns: bool) -> list[int]:
    """Predictions of an adapter's answers by the mean: first that of the others, then its own if it `learns`."""
    mean, predicted = RunningMean(), []
    for one in answers:
        if one.part == "train" and one.adapter not in (None, name):
            mean.learn(one.input(), one.tokens)
    for one in answers:
        if one.adapter == name:
            predicted.append(mean.predict(one.input()))
            if learns:
                mean.learn(one.input(), one.tokens)
    return predicted


def size_queues(answers: Sequence[Answer]) -> SizeQueues:
    """The size classes that the scheduler `chameleon` makes of these requests."""
    recent = RecentRequests(len(answers))
    for at, one in enumerate(answers):
        recent.add_arrival(cost(one, one.tokens), float(at))
    return recent.make_queues(8192, 4)


def cost(answer: Answer, tokens: int) -> RequestCost:
    rank = 0
    if answer.adapter:
        rank = json.loads((HERE / answer.adapter / "adapter_config.json").read_text())["r"]
    return RequestCost(answer.prompt_tokens, tokens, rank, answer.prompt_tokens + tokens, 1)


def judge(predicted: Sequence[int], answers: Sequence[Answer], queues: SizeQueues) -> dict[str, float]:
    """Shares of predictions in the right size class and near the length, and Spearman's rank correlation."""
    guesses, actual = np.array(predicted), np.array([one.tokens for one in answers])
    classes = [[queues.queue_of(cost(*pair)) for pair in zip(answers, of, strict=True)] for of in (guesses, actual)]
    right = np.mean(np.array(classes[0]) == np.array(classes[1]))
    near = (guesses <= NEAR * actual) & (actual <= NEAR * guesses)
    figures = {"class": right, "near": near.mean(), "spearman": spearman(guesses, actual)}
    return {"answers": len(answers), **{name: round(float(value), 3) for name, value in figures.items()}}


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of the ranks; equal numbers share theirs. 0 if one of the two is constant."""
    ranks = [_ranks(values) for values in (one, other)]
    return 0.0 if any(np.ptp(values) == 0 for values in ranks) else float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


if __name__ == "__main__":
    main()
