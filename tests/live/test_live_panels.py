"""Each panel shows the server's own numbers, whatever the server says, and says in words what it draws."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from shapeshift.live import encode, fleet, generate, image, lora, sidecar, text
from shapeshift.live.app import PANELS, Panel, classes
from shapeshift.live.source import View
from shapeshift.live.svg import WIDTH, Plot
from shapeshift.serving.events import Event
from tests.live.servers import view

STATUS: dict[str, Any] = {
    "sidecar": {"pid": 12, "frozen": False, "decisions": []},
    "nodes": [{"name": "", "state": "serving", "problem": "", "version": "2", "workers": 1, "texts_per_s": 0.0}],
    "fronts": [
        {
            "name": "e",
            "models": [{"name": "e", "state": "serving", "pid": 3}],
            "plan": {"plan": "1 x 32", "reason": "texts grew"},
        }
    ],
    "workers": [
        {
            "name": "e_w00",
            "front": "e",
            "bin": 32,
            "state": "serving",
            "outstanding": 2,
            "generation": 5,
            "pid": 4,
            "timeouts": 0,
        }
    ],
    "models": [{"name": "other", "state": "dead", "pid": 9}],
}


def tiles(html: str) -> dict[str, str]:
    """The numbers of a panel by their words."""
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)(?:<small>.*?)?</dd>", html)
    return dict(found)


def notes(html: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>([^<]*)</dt><dd>[^<]*<small>(.*?)</small>", html))


def label(html: str, title: str) -> str:
    """What a plot says of itself."""
    return next(one for one in re.findall(r'aria-label="([^"]*)"', html) if one.startswith(title))


def encoding() -> View:
    lengths = {f"e request_tokens_bucket le={le}": count for le, count in (("8", 4), ("16", 10), ("512", 10))}
    new = {**lengths, "e request_tokens_count": 10, "e engine_rows_total": 10, "e requests_total code=OK": 10}
    new |= {"e engine_used_total engine=13": 2, "e engine_used_total engine=dynamic": 1, "e requests_waiting": 3}
    packs = [
        Event("pack", 9.0, {"thread": "engine-0", "size": 20, "tokens": 18, "texts": [8, 10], "ms": 2.0}),
        Event("pack", 9.5, {"thread": "engine-1", "size": 32, "tokens": 30, "texts": [30], "ms": 4.0}),
    ]
    worker = [Event("pack", 9.7, {"thread": "MainThread", "size": 32, "tokens": 32, "texts": [32], "ms": 4.0})]
    return view(dict.fromkeys(new, 0), new, {"e": packs, "e_w00": worker}, status=STATUS)


def test_encode_counts_texts_and_padding() -> None:
    html = encode.draw(encoding(), "e")
    shown = tiles(html)
    assert shown["texts a second"] == "1"
    assert shown["padding computed"] == "5%", "80 of 84 tokens are text"
    assert "padded to 512 each it would be 96%" in notes(html)["padding computed"]
    assert (shown["texts in a call"], shown["waiting now"]) == ("1.33", "3")
    assert "10 texts in the last 10 s" in label(html, "Lengths") and "Engines: 13, 32" in label(html, "Lengths")
    assert "80 of 84 tokens are text" in label(html, "The last engine calls")
    assert "84 tokens were computed for 80 of text; padded to 512 it were 2048" in label(html, "Tokens computed")
    assert "e_w00" in html, "its workers are listed"


def test_each_class_of_requests_has_a_row_once_one_is_named() -> None:
    new: dict[str, float] = {"e class_started_total slo_class=interactive": 4, "e class_started_total slo_class=*": 10}
    new |= {"e class_wait_seconds_total slo_class=interactive": 0.2, "e class_overtaken_total slo_class=batch": 4}
    new |= {f"e class_waiting slo_class={name}": count for name, count in (("interactive", 0), ("*", 1), ("batch", 7))}
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", classes(view(dict.fromkeys(new, 0), new), "e"))
    assert [row.split("</td><td>") for row in rows] == [
        ["batch", "7", "0", "–", "4"],
        ["interactive", "0", "4", "50 ms", "0"],
        ["all others", "1", "10", "0 ms", "0"],
    ]
    plain = {"e class_started_total slo_class=*": 10, "e class_waiting slo_class=batch": 0}
    assert not classes(view({}, plain), "e") and not classes(view({}, {}), "e")


def test_encode_shows_calls_whose_texts_are_only_counted() -> None:
    values = {"thread": "engine-0", "size": 1000, "tokens": 950, "texts": 95, "ms": 2.0}
    shown = encode.draw(view({}, {}, {"e": [Event("pack", 9.0, values)]}, status=STATUS), "e")
    assert "computed 95 texts: 950 of 1000 tokens are text" in label(shown, "The last engine calls")
    assert tiles(shown)["texts in a call"] == "95" and tiles(shown)["padding computed"] == "5%"


def test_threads_of_each_process_have_their_lanes() -> None:
    values = {"thread": "engine-0", "size": 8, "tokens": 8, "texts": [8], "ms": 1000.0}
    calls = {"e": [Event("pack", 9.0, values)], "e_w00": [Event("pack", 9.5, values), Event("pack", 9.8, values)]}
    html = encode.draw(view({}, {}, calls, status=STATUS), "e")
    words = label(html, "What each engine thread did")
    assert "thread 0 computed 10%" in words and "w00 0 computed 20%" in words


def test_the_bins_of_workers_follow_the_texts() -> None:
    def call(at: float, size: int) -> Event:
        return Event("pack", at, {"thread": "engine-0", "size": size, "tokens": 9, "texts": [9], "ms": 100.0})

    calls = {"e_w00": [call(1.0, 64), call(2.0, 64), call(5.0, 256), call(9.0, 64)]}
    html = encode.draw(view({}, {}, calls, status=STATUS), "e")
    assert label(html, "Texts that came").endswith("Bins of the workers: e_w00 64, then 256, then 64. Texts: 4.")


BLOCKS = [90, 4, 3, 2, 1]


def join(at: float, *slots: int, prompt: int = 9, shared: int = 0) -> Event:
    texts = {"prompt": prompt, "shared": shared, "adapter": -1}
    return Event("join", at, {"slot": slots[0], "slots": [*slots], **texts, "blocks": BLOCKS})


def leave(at: float, slot: int, tokens: int, why: str) -> Event:
    return Event("leave", at, {"slot": slot, "tokens": tokens, "why": why, "blocks": BLOCKS})


def generating() -> dict[str, list[Event]]:
    return {
        "g": [
            join(2.0, 0, prompt=20, shared=16),
            Event("first", 3.0, {"slot": 0}),
            leave(6.0, 0, 30, "length"),
            join(7.0, 0),
            leave(7.5, 0, 4, "preempted"),
            join(8.0, 1),
        ]
    }


def test_generate_shows_who_held_which_slot() -> None:
    new = {"g slots": 4, "g requests_running": 1, "g requests_waiting": 2, "g requests_total code=OK": 1}
    new |= {"g generated_tokens_total": 60, "g iteration_ms_count": 20}
    new |= {"g prefix_cache_queries_total": 40, "g prefix_cache_hits_total": 10}
    now = view(dict.fromkeys(new, 0), new, generating())
    html = generate.draw(now, "g")
    shown = tiles(html)
    assert shown["tokens a second"] == "6" and shown["texts advanced by a step"] == "3"
    assert shown["slots in use now"] == "1 of 4" and notes(html)["slots in use now"] == "2 wait for one"
    assert shown["prompt tokens not computed"] == "25%"
    assert "here: together: 2, one text at a time: 6" in label(html, "Reads of all weights")
    assert "lost its slot" in html, "one was preempted"
    assert [(stay.slots, stay.joined, stay.first, stay.left, stay.why) for stay in generate.stays(now, "g")] == [
        ([0], 2.0, 3.0, 6.0, "length"),
        ([0], 7.0, None, 7.5, "preempted"),
        ([1], 8.0, None, None, ""),
    ]
    assert "2 requests left their slots after 34 tokens, 1 hold one now" in label(html, "Slots")
    assert "2 blocks shared by several texts" in label(html, "Memory")
    cells = html.count("<title>shared by several texts</title>")
    assert cells == 2 and html.count("<title>empty</title>") == 90


def test_generate_counts_a_request_with_beams_once() -> None:
    # The request's first slot changes as its beams do.
    beams = [join(2.0, 0, 1, 2), Event("first", 3.0, {"slot": 2}), leave(6.0, 1, 30, "length")]
    now = view({"g slots": 4}, {"g slots": 4}, {"g": [*beams, join(7.0, 2, 3), join(8.0, 0)]})
    assert [(stay.slots, stay.first, stay.left) for stay in generate.stays(now, "g")] == [
        ([0, 1, 2], 3.0, 6.0),
        ([2, 3], None, None),
        ([0], None, None),
    ]
    html = generate.draw(now, "g")
    assert "1 requests left their slots after 30 tokens, 2 hold one now" in label(html, "Slots")
    # A bar in each of its slots.
    assert html.count("30 tokens, prompt of 9 tokens; left: length") == 3


def test_generate_shows_that_all_lost_their_slots() -> None:
    clear = Event("clear", 7.0, {"why": "failed", "blocks": [100, 0, 0, 0, 0]})
    now = view({}, {}, {"g": [join(2.0, 0, 1), join(3.0, 2), clear]})
    assert [(stay.left, stay.why) for stay in generate.stays(now, "g")] == [(7.0, "failed")] * 2
    assert generate.block_counts(now, "g") == [100, 0, 0, 0, 0]


def test_a_large_memory_is_drawn_with_few_cells() -> None:
    blocks = [60_000, 5_000, 400, 99, 1]
    html = generate.memory(view({}, {}, {"g": [Event("clear", 9.0, {"why": "failed", "blocks": blocks})]}), "g").html()
    assert 900 < html.count("<title>") <= 1005 and len(html) < 200_000
    assert "a cell is 66 blocks" in html and "60000 blocks empty" in html
    assert html.count("<title>lent to adapters</title>") == 1, "each state that there is is seen"


def test_lora_shows_what_is_in_memory() -> None:
    new = {"g adapters_known": 5, "g adapters_resident": 2, "g adapter_hits_total": 9, "g adapter_misses_total": 1}
    new |= {"g adapter_requests_total adapter=a": 7, "g adapter_requests_total adapter=<b>": 3, "g slots": 4}
    new |= {
        "g adapter_loaded_bytes_total": 4 << 20,
        "g adapter_evictions_total why=room": 1,
        "g requests_total code=OK": 1,
    }
    new |= {"g adapter_queue_requests queue=0": 2, "g adapter_queue_quota_tokens queue=0": 100}
    events = [
        Event("load", 4.0, {"adapter": "gone", "bytes": 1 << 20, "ms": 9.0}),
        Event("load", 5.0, {"adapter": "a", "bytes": 3 << 20, "ms": 9.0}),
        Event("evict", 6.0, {"adapter": "gone", "why": "room", "bytes": 1 << 20}),
        Event("residents", 7.0, {"rows": [["<b>", 1 << 20, 4, 1, 0], ["a", 3 << 20, 2, 0, 0]]}),
    ]
    now = view(dict.fromkeys(new, 0), new, {"g": events})
    html = lora.draw(now, "g")
    assert tiles(html)["found their adapter in memory"] == "90%"
    assert tiles(html)["adapters in memory now"] == "2 of 5"
    assert set(lora.residents(now, "g")) == {"a", "<b>"}
    assert label(html, "Adapters in memory now") == "Adapters in memory now. 2 adapters, 4.0 MiB: a, &lt;b&gt;"
    assert "2 loads and 1 evictions; evicted by reason: room 1" in label(html, "Loads")
    # 7 requests of 3 MiB and 3 of 1 MiB; 4 MiB were loaded.
    assert "here: 4 MiB, for each request: 24 MiB" in label(html, "Adapters loaded")
    assert "queue 0: 2 wait" in label(html, "Waiting requests")
    assert generate.models(now) == [] and lora.models(now) == ["g"], "it has its own panel"


def batch(at: float, gamma: int, slack: float, **values: Any) -> Event:
    fields = {"gamma": gamma, "images": 4, "in_time": 4, "ms": 100.0, "waited": 0.0, "slack": slack}
    return Event("batch", at, {**fields, "earns": [2.0, 4.0], "costs": [5.0, 25.0], **values})


def test_image_shows_what_arrived_and_what_it_earned() -> None:
    new: dict[str, float] = {
        "i gamma_images_total gamma=-3": 4,
        "i gamma_images_total gamma=0": 20,
        "i requests_total code=OK": 6,
    }
    new |= {
        "i images_total outcome=in_time": 24,
        "i images_total outcome=late": 6,
        "i images_total outcome=evicted": 10,
    }
    new |= {"i utility_total": 30.0, "i batch_images_sum": 24, "i batch_images_count": 6}
    # One batch a second, of 100 ms at gamma 0: gamma -3 takes 20 ms, and both have time for all of them.
    calm = [batch(second + 1.0, 0, 50.0) for second in range(6)]
    now = view(dict.fromkeys(new, 0), new, {"i": calm})
    html = image.draw(now, "i")
    assert tiles(html)["images a second"] == "4" and tiles(html)["in time"] == "60%"
    assert notes(html)["in time"] == "last 10 s: 6 late, 10 dropped, 0 requests refused"
    assert tiles(html)["utility earned a second"] == "3"
    # In time: 4 of 5 batches at the best gamma, one at the fast one. Late: half a batch. Dropped: as much as a batch.
    calm[0] = batch(1.0, -3, 50.0)
    calm[5] = batch(6.0, 0, -5.0, in_time=2)
    dropped = Event("dropped", 5.1, {"images": 4, "ms": 0.0, "waited": 100.0, "slack": -20.0, "earns": [2.0, 4.0]})
    now = view(dict.fromkeys(new, 0), new, {"i": [*calm, dropped]})
    assert image.worth(now, "i") == tuple(map(pytest.approx, (2.0, 0.2, 0.2, 0.4)))
    assert "arrived: 2.80, earned: 2, less accurate: 0.20, late: 0.20, dropped: 0.40" in label(
        image.draw(now, "i"), "What arrived"
    )


@pytest.mark.parametrize(("in_time", "overload", "tone"), [(95, False, "good"), (80, False, ""), (60, True, "bad")])
def test_more_images_than_the_machine_bears_are_called_overload(in_time: int, overload: bool, tone: str) -> None:
    new: dict[str, float] = {"i images_total outcome=in_time": in_time, "i images_total outcome=late": 100 - in_time}
    html = image.draw(view(dict.fromkeys(new, 0), new), "i")
    assert ("Overload: " in html) is overload
    assert f'<div class="tile {tone}"><dt>in time' in html


@pytest.mark.parametrize(("factor", "words"), [(1.1, "as measured"), (3.44, "3.44 times slower")])
def test_a_slow_machine_is_said_in_words(factor: float, words: str) -> None:
    assert tiles(image.draw(view({}, {"i cost_factor": factor}), "i"))["speed of the machine"] == words


def test_no_batch_is_drawn_beyond_now() -> None:
    new = {"i gamma_images_total gamma=0": 4}
    html = image.draw(view(new, new, {"i": [batch(10.0, 0, 50.0, ms=0.1, earns=[4.0], costs=[1.0])]}), "i")
    ((x, width),) = re.findall(
        r'<rect x="([0-9.]+)" y="[0-9.]+" width="([0-9.]+)"[^>]* class="in-time"><title>4 images at', html
    )
    assert float(x) + float(width) <= WIDTH


def test_text_shows_who_answered_how_well_and_the_time_that_it_spared() -> None:
    new: dict[str, float] = {
        "t level_texts_total level=1": 30,
        "t level_texts_total level=2": 10,
        "t requests_total code=OK": 40,
    }
    new |= {"t early_share_recent": 0.75, "t early_share_drift": -0.05, "t request_tokens_count": 40}
    new |= {"t profiled_accuracy": 0.97, "t profiled_last_level_accuracy": 0.975, "t first_level_threshold": 0.65}
    new |= {"t profiled_level_ms level=1": 2.0, "t profiled_level_ms level=2": 10.0, "t profiled_level_ms level=3": 0}
    events = [Event("text", 5.0, {"level": 1, "confidence": 0.9, "ms": 4.0}) for _ in range(3)]
    events.append(Event("text", 6.0, {"level": 2, "confidence": 0.3, "ms": 20.0}))
    events.append(Event("text", 6.0, {"level": 2, "confidence": None, "ms": 20.0}))
    html = text.draw(view(dict.fromkeys(new, 0), new, {"t": events}), "t")
    assert tiles(html)["answered by the small model"] == "75%"
    assert notes(html)["answered by the small model"] == "last 10 s; 80% of the texts of its profile"
    assert tiles(html)["right answers"] == "97.0%" and "97.5% the large model alone" in notes(html)["right answers"]
    assert tiles(html)["mean time of a text"] == "10.4 ms"
    assert "small model: 30 texts, large model: 10 texts" in label(html, "Who answered")
    assert "small model first: 4.50 ms, large model alone: 10 ms" in label(html, "Engine time")
    assert "threshold, 65%" in html and "words not read again" not in html and "kept an earlier answer" not in html
    assert "4 texts, on average sure by 75%; 1 went on" in label(html, "How sure")


def test_the_sidecar_says_what_it_decided_and_why() -> None:
    decisions = [{"at": "2026-01-01T10:00:00+00:00", "kind": "reload", "subject": "e", "text": "its process <7> ended"}]
    html = sidecar.draw(view({}, {}, status=STATUS, decisions=decisions), "this server")
    assert tiles(html)["sidecar"] == "watches" and tiles(html)["processes that serve"] == "1 of 2"
    for words in ("10:00:00", "reload", "its process &lt;7&gt; ended", "1 x 32", "texts grew", "e_w00", "dead, 9"):
        assert words in html


def test_the_sidecar_says_how_to_see_it_work() -> None:
    assert "end the process of e on the server's machine: <code>kill -9 3</code>" in sidecar.draw(
        view({}, {}, status=STATUS), "this server"
    )


def test_the_fleet_shows_each_node_and_which_have_left() -> None:
    new = {"g fleet_nodes": 2, "g requests_on_other_nodes": 3, "g requests_forwarded_total node=b": 20}
    seen = [
        Event("nodes", 5.0, {"rows": [["c", True, 9.0, "0.2.0", 2.0]]}),
        Event("nodes", 9.5, {"rows": [["b", True, 5.0, "0.3.0", 1.5], ["d", False, 1.0, "0.2.0", 9.0]]}),
        Event("nodes", 9.5, {"rows": [["a", True, 4.0, "0.2.0", 0.0]]}),
    ]
    known = view(dict.fromkeys(new, 0), new, {"g": seen})
    assert fleet.models(known) == ["g"]
    html = fleet.draw(known, "g")
    rows = [row.split("</td><td>") for row in re.findall(r"<tr><td>(.*?)</td></tr>", html)]
    assert rows == [
        ["a (this one)", "serves", "4", "–", "0", "0.2.0"],
        ["b", "serves", "5", "1.50 ms", "2", "0.3.0"],
        ["c", "has left: drained or stopped", "9", "2 ms", "0", "0.2.0"],
        ["d", "does not answer", "1", "9 ms", "0", "0.2.0"],
    ]
    assert tiles(html) == {
        "nodes that serve": "2",
        "requests passed on a second": "2",
        "requests on other nodes now": "3",
        "versions": "2",
    }


def test_plans_do_not_push_out_what_the_sidecar_mended() -> None:
    def decision(kind: str, text: str) -> dict[str, str]:
        return {"at": "2026-01-01T10:00:00+00:00", "kind": kind, "subject": "e", "text": text}

    decisions = [decision("health", "its process ended"), *(decision("plan", f"plan {n}") for n in range(30))]
    html = sidecar.draw(view({}, {}, status=STATUS, decisions=decisions), "this server")
    assert "its process ended" in html and "plan 29" in html and "plan 5<" not in html


def test_a_legend_has_only_what_is_drawn() -> None:
    plot = Plot(10, "title")
    plot.rect(0, 0, 1, 1, "early")
    plot.legend(("early", "by the small model"), ("late-level", "by the large model"))
    assert "by the small model" in plot.html() and "by the large model" not in plot.html()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.NAME)
def test_a_panel_says_why_it_is_empty(panel: Panel) -> None:
    """Of a server that has done nothing, or of another version whose metrics have other names."""
    html = panel.draw(view({}, {}, status=STATUS), "e")
    assert html.count("<figure") == len(re.findall(r'role="img"', html))
    ElementTree.fromstring(f"<all>{html}</all>")
    for one in re.findall(r'role="img" aria-label="([^"]*)"', html):
        assert one.partition(". ")[2], "each plot says in words what it shows"


def test_no_name_from_the_server_is_taken_for_html() -> None:
    name = '<script>alert("x")</script>'
    new = {"g adapters_known": 5, "g slots": 1, "g requests_total code=OK": 1}
    events = [Event("load", 4.0, {"adapter": name, "bytes": 1, "ms": 9.0})]
    assert "<script" not in lora.draw(view(new, new, {"g": events}), "g")
    assert "<script" not in sidecar.draw(
        view({}, {}, status=STATUS, decisions=[{"at": name, "kind": name, "subject": name, "text": name}]),
        "this server",
    )
