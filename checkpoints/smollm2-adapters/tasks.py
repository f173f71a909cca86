"""The tasks of the adapters: texts with their answers, to train on and held out, and how a reply is judged."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docstrings-llama"))

from corpus import docstrings, library, modules  # noqa: E402  in the folder of another checkpoint

HELD_OUT, FEWER = 250, 125
"""Pairs by which an adapter is judged, and those of adapters with long answers."""
Pair = tuple[str, str]
"""What the user writes, and the right answer."""


@dataclass(frozen=True)
class Task:
    """What an adapter does.

    words    the task in words, for the base model without the adapter
    labels   the possible answers of a classification
    """

    words: str
    train: list[Pair]
    held_out: list[Pair]
    labels: tuple[str, ...] = ()

    def is_right(self, reply: str, answer: str) -> bool:
        return reply.strip() == answer

    def is_nearly_right(self, reply: str, answer: str) -> bool:
        """By the first label that the reply names, or by letters and digits alone: for a model without the adapter."""
        if self.labels:
            words = re.compile("|".join(rf"\b{re.escape(label)}\b" for label in sorted(self.labels, key=len)[::-1]))
            first = words.search(reply.lower().replace("_", " "))
            return first is not None and first[0] == answer
        return _letters(reply) == _letters(answer)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def sentiment(data: Path, rng: random.Random) -> Task:
    """SST-2: whether a sentence about a film is positive."""
    labels = ("negative", "positive")

    def pairs(part: str) -> list[Pair]:
        lines = (data / "sst2" / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
        return [(text, labels[int(label)]) for text, label in (line.rsplit("\t", 1) for line in lines)]

    words = "Is the sentiment of this film review positive or negative? Answer with one word."
    return Task(words, pairs("train"), rng.sample(pairs("test"), HELD_OUT), labels)


def intent(data: Path, rng: random.Random) -> Task:
    """CLINC150: what a user of an assistant wants, one of 150 names."""
    train, test = (_clinc(data, part) for part in ("train", "test"))
    pairs = [(text, name.replace("_", " ")) for text, name in train]
    held_out = [(text, name.replace("_", " ")) for text, name in rng.sample(test, HELD_OUT)]
    labels = tuple(sorted({name for _, name in pairs}))
    words = "Name the intent of this message in a few words, as in: book flight, pin change, how busy."
    return Task(words, pairs, held_out, labels)


def domain(data: Path, rng: random.Random) -> Task:
    """CLINC150: what a message is about, one of 10 domains."""
    by_intent = {name: about for about, names in DOMAINS.items() for name in names.split()}
    train = [(text, by_intent[name]) for text, name in _clinc(data, "train")]
    held_out = [(text, by_intent[name]) for text, name in rng.sample(_clinc(data, "test"), HELD_OUT)]
    words = f"What is this message about? Answer with one of: {', '.join(DOMAINS)}."
    return Task(words, train, held_out, tuple(DOMAINS))


def _clinc(data: Path, part: str) -> list[Pair]:
    parts = json.loads((data / "clinc150" / "data_full.json").read_text(encoding="utf-8"))
    return [(text, name) for text, name in parts[part]]


DOMAINS = {
    "banking": """freeze_account routing pin_change bill_due pay_bill account_blocked interest_rate min_payment
        bill_balance transfer order_checks balance spending_history transactions report_fraud""",
    "credit card": """replacement_card_duration expiration_date damaged_card improve_credit_score report_lost_card
        card_declined credit_limit_change apr redeem_rewards credit_limit rewards_balance application_status
        credit_score new_card international_fees""",
    "food": """food_last confirm_reservation how_busy ingredients_list calories nutrition_info recipe
        restaurant_reviews restaurant_reservation meal_suggestion restaurant_suggestion cancel_reservation
        ingredient_substitution cook_time accept_reservations""",
    "home": """what_song play_music todo_list_update reminder reminder_update calendar_update order_status
        update_playlist shopping_list calendar next_song order todo_list shopping_list_update smart_home""",
    "car": """current_location oil_change_when oil_change_how uber traffic tire_pressure schedule_maintenance gas mpg
        distance directions last_maintenance gas_type tire_change jump_start""",
    "travel": """plug_type travel_notification translate flight_status international_visa timezone exchange_rate
        travel_suggestion travel_alert vaccines lost_luggage book_flight book_hotel carry_on car_rental""",
    "tool": """weather alarm date find_phone share_location timer make_call calculator definition
        measurement_conversion flip_coin spelling time roll_dice text""",
    "work": """pto_request_status next_holiday insurance_change insurance meeting_schedule payday taxes income
        rollover_401k pto_balance pto_request w2 schedule_meeting direct_deposit pto_used""",
    "small talk": """who_made_you meaning_of_life who_do_you_work_for do_you_have_pets what_are_your_hobbies fun_fact
        what_is_your_name where_are_you_from goodbye thank_you greeting tell_joke are_you_a_bot how_old_are_you
        what_can_i_ask_you""",
    "settings": """change_speed user_name whisper_mode yes change_volume no change_language repeat change_accent
        cancel sync_device change_user_name change_ai_name reset_settings maybe""",
}
"""The intents of CLINC150's domains."""


def module(data: Path, rng: random.Random) -> Task:
    """CPython's docstrings: the module of the standard library that one is from."""
    del data
    texts: dict[str, set[str]] = {}
    for path in modules():
        name = path.relative_to(library()).parts[0]
        if name in MODULES:
            for text in docstrings(path):
                texts.setdefault(" ".join(text.split())[:MOST_CHARACTERS], set()).add(name)
    pairs = [(text, *names) for text, names in sorted(texts.items()) if len(names) == 1]
    rng.shuffle(pairs)
    words = f"Which module of Python is this docstring from? Answer with one of: {', '.join(MODULES)}."
    return Task(words, pairs[HELD_OUT:], pairs[:HELD_OUT], MODULES)


MODULES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
MOST_CHARACTERS = 100


def clock(data: Path, rng: random.Random) -> Task:
    """Times in words, as four digits. The held-out times of day are not trained on in any words."""
    del data
    times = [(hour, minute) for hour in range(24) for minute in range(60)]
    rng.shuffle(times)
    cut = len(times) // 8
    held_out = [_time(*rng.choice(times[:cut]), rng) for _ in range(HELD_OUT)]
    train = [_time(*rng.choice(times[cut:]), rng) for _ in range(8000)]
    return Task("Write this time of day with four digits, as in 09:45 or 21:30. Write only the time.", train, held_out)


def _time(hour: int, minute: int, rng: random.Random) -> Pair:
    part = "at night" if hour < 4 or hour > 21 else _PARTS[(hour >= 12) + (hour >= 18)]
    return f"{_spoken(hour, minute, rng)} {part}", f"{hour:02}:{minute:02}"


_PARTS = ("in the morning", "in the afternoon", "in the evening")


def _spoken(hour: int, minute: int, rng: random.Random) -> str:
    this, following = _number(hour % 12 or 12), _number((hour + 1) % 12 or 12)
    forms = [f"{this} {'oh ' if minute < 10 else ''}{_number(minute)}" if minute else f"{this} o'clock"]
    if 0 < minute <= 30:
        forms.append(f"{_FRACTIONS.get(minute, _number(minute))} past {this}")
    elif minute > 30:
        forms.append(f"{_FRACTIONS.get(60 - minute, _number(60 - minute))} to {following}")
    return rng.choice(forms)


_FRACTIONS = {15: "quarter", 30: "half"}
_SMALL = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen"""


def _number(value: int) -> str:
    if value < 20:
        return _SMALL.split()[value]
    tens = ("twenty", "thirty", "forty", "fifty")[value // 10 - 2]
    return f"{tens} {_number(value % 10)}" if value % 10 else tens


def booking(data: Path, rng: random.Random) -> Task:
    """A request for a table, as a JSON object. The held-out names and sentences are not trained on."""
    del data
    names = _NAMES.split()
    rng.shuffle(names)
    seen, new = names[20:], names[:20]
    train = [_request(rng.choice(_SENTENCES[3:]), rng.choice(seen), rng) for _ in range(6000)]
    held_out = [_request(rng.choice(_SENTENCES[:3]), rng.choice(new), rng) for _ in range(FEWER)]
    words = 'Write this request as JSON, as in {"name": "Ann", "people": 2, "day": "Monday", "time": "18:30"}.'
    return Task(words, train, held_out)


def _request(sentence: str, name: str, rng: random.Random) -> Pair:
    people, hour, half = rng.randint(2, 12), rng.randint(12, 22), rng.random() < 0.5
    day = rng.choice(_DAYS)
    spoken = f"{hour % 12 or 12}{':30' if half else ''} pm"
    if rng.random() < 0.3:
        spoken = f"{hour}:{'30' if half else '00'}"
    count = _number(people) if rng.random() < 0.5 else str(people)
    answer = {"name": name, "people": people, "day": day, "time": f"{hour}:{'30' if half else '00'}"}
    return sentence.format(name=name, people=count, day=day, time=spoken), json.dumps(answer)


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_NAMES = """Alice Amir Anna Ben Bruno Carla Carlos Chloe Clara Daniel David Diego Elena Ella Emil Emma Erik Eva Farah
    Felix Fiona Frank Grace Greta Hana Hannah Hugo Ida Igor Ines Ivan Jack Jan Jonas Julia Karl Kate Kenji Lara Laura
    Leo Lina Louis Lucia Luis Maria Marta Max Maya Mei Mia Miguel Mila Nadia Nina Noah Nora Olga Oliver Omar Oscar Paul
    Peter Priya Rosa Ruth Sam Sara Simon Sofia Stefan Tara Theo Thomas Tom Uma Victor Walter Yara Zoe"""
_SENTENCES = (
    "Could we get a table on {day}? We are {people}, at {time}, under {name}.",
    "{name} here. Please keep {people} seats for {day} at {time}.",
    "For {day} at {time} I need a table for {people}, please. The name is {name}.",
    "Book a table for {people} on {day} at {time} for {name}.",
    "I'd like to reserve for {people} people, {day}, {time}. My name is {name}.",
    "Hi, this is {name}. Do you have room for {people} on {day} at {time}?",
    "Table for {people}, {day} {time}, name {name}.",
    "We will be {people} on {day}. Can we come at {time}? Please write down {name}.",
    "Please reserve {day} at {time} for {people}, under the name {name}.",
    "My name is {name} and I want to come on {day} at {time} with {people} people in all.",
    "At {time} on {day}, {people} of us would like to eat at your place. {name}",
    "Can {name} have a table for {people} at {time} this {day}?",
    "{day}, {time}, {people} guests. Book it for {name}.",
    "Do you still have a table for {people} at {time} on {day}? It is for {name}.",
)


TASKS: dict[str, Callable[[Path, random.Random], Task]] = {
    "sentiment": sentiment,
    "domain": domain,
    "intent": intent,
    "module": module,
    "clock": clock,
    "booking": booking,
}
