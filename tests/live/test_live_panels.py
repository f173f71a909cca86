"""Each panel shows the server's own numbers, whatever the server says, and says in words what it draws."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from shapeshift.live import encode, generate, image, lora, sidecar, text
from shapeshift.live.app import PANELS, Panel
from shapeshift.live.source import View
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
        Event("pack", 9.0, {"thread": "engine-0", "size": 20, "dynamic": 0, "texts": [8, 10], "ms": 2.0}),
        Event("pack", 9.5, {"thread": "engine-1", "size": 32, "dynamic": 0, "texts": [30], "ms": 4.0}),
    ]
    worker = [Event("pack", 9.7, {"thread": "MainThread", "size": 32, "dynamic": 0, "texts": [32], "ms": 4.0})]
    return view(dict.fromkeys(new, 0), new, {"e": packs, "e_w00": worker}, status=STATUS)


def test_encode_counts_texts_and_padding() -> None:
    html = encode.draw(encoding(), "e")
    shown = tiles(html)
    assert shown["texts a second"] == "1"
    assert shown["padding computed"] == "5%", "80 of 84 tokens are text"
    assert "padded to 512 each it would be 96%" in notes(html)["padding computed"]
    assert (shown["texts in a call"], shown["waiting"]) == ("1.33", "3")
    assert "10 texts in the last minute" in label(html, "Lengths") and "Engines: 13, 32" in label(html, "Lengths")
    assert "80 of 84 tokens are text" in label(html, "The last engine calls")
    assert "84 tokens were computed for 80 of text; padded to 512 it were 2048" in label(html, "Tokens computed")
    assert "e_w00" in html, "its workers are listed"


def generating(adapter: int = -1) -> dict[str, list[Event]]:
    blocks = [90, 4, 3, 2, 1]
    return {
        "g": [
            Event("join", 2.0, {"slots": [0], "prompt": 20, "shared": 16, "adapter": adapter, "blocks": blocks}),
            Event("first", 3.0, {"slot": 0, "ms": 900.0}),
            Event("leave", 6.0, {"slots": [0], "tokens": 30, "why": "length", "blocks": blocks}),
            Event("join", 7.0, {"slots": [0], "prompt": 9, "shared": 0, "adapter": adapter, "blocks": blocks}),
            Event("leave", 7.5, {"slots": [0], "tokens": 4, "why": "preempted", "blocks": blocks}),
            Event("join", 8.0, {"slots": [1], "prompt": 9, "shared": 0, "adapter": adapter, "blocks": blocks}),
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
    assert shown["slots in use"] == "1 of 4" and notes(html)["slots in use"] == "2 wait for one"
    assert shown["prompt tokens not computed"] == "25%"
    assert [(stay.slot, stay.joined, stay.first, stay.left, stay.why) for stay in generate.stays(now, "g")] == [
        (0, 2.0, 3.0, 6.0, "length"),
        (0, 7.0, None, 7.5, "preempted"),
        (1, 8.0, None, None, ""),
    ]
    assert "2 requests left their slots after 34 tokens, 1 hold one now" in label(html, "Slots")
    assert "2 blocks shared by several texts" in label(html, "Memory")
    cells = html.count("<title>shared by several texts</title>")
    assert cells == 2 and html.count("<title>empty</title>") == 90


def test_lora_shows_what_is_in_memory() -> None:
    new = {"g adapters_known": 5, "g adapters_resident": 2, "g adapter_hits_total": 9, "g adapter_misses_total": 1}
    new |= {"g adapter_requests_total adapter=a": 7, "g adapter_requests_total adapter=<b>": 3, "g slots": 4}
    new |= {"g adapter_load_ms_count": 3, "g adapter_evictions_total why=room": 1, "g requests_total code=OK": 1}
    new |= {"g adapter_queue_requests queue=0": 2, "g adapter_queue_quota_tokens queue=0": 100}
    events = [
        Event("load", 4.0, {"adapter": "gone", "number": 1, "bytes": 1 << 20, "ms": 9.0}),
        Event("load", 5.0, {"adapter": "a", "number": 2, "bytes": 3 << 20, "ms": 9.0}),
        Event("evict", 6.0, {"adapter": "gone", "why": "room", "bytes": 1 << 20}),
        Event(
            "resident",
            *(7.0, {"adapter": "<b>", "number": 3, "rank": 8, "bytes": 1 << 20, "users": 1, "uses": 4, "blocks": 0}),
        ),
    ]
    now = view(dict.fromkeys(new, 0), new, {"g": events})
    html = lora.draw(now, "g")
    assert tiles(html)["found their adapter in memory"] == "90%"
    assert tiles(html)["adapters in memory"] == "2 of 5" and notes(html)["loads, last minute"] == "1 evicted"
    assert set(lora.residents(now, "g")) == {"a", "<b>"}
    assert label(html, "Adapters in memory") == "Adapters in memory. 2 adapters, 4.0 MiB: a, &lt;b&gt;"
    assert "2 loads and 1 evictions; evicted by reason: room 1" in label(html, "Loads")
    assert "queue 0: 2 wait" in label(html, "Who waits")
    assert generate.models(now) == [] and lora.models(now) == ["g"], "it has its own panel"


def batch(at: float, gamma: int, slack: float, **values: Any) -> Event:
    fields = {"gamma": gamma, "images": 4, "in_time": 4, "ms": 100.0, "waited": 0.0, "slack": slack}
    return Event("batch", at, {**fields, "earns": [2.0, 4.0], "costs": [5.0, 25.0], **values})


def test_image_compares_with_each_fixed_gamma() -> None:
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
    assert notes(html)["in time"] == "6 late, 10 dropped, 0 refused"
    assert tiles(html)["utility earned a second"] == "3"
    result = image.earned(now, "i")
    assert result is not None
    assert (result.here, result.fixed) == (pytest.approx(2.4), {-3: pytest.approx(1.2), 0: pytest.approx(2.4)})
    assert "The best fixed gamma, 0: 2.4." in html
    # Batches that come at once, and ran at the fast gamma: at gamma 0 only the first would have been in time.
    rush = [batch(5.0 + 0.02 * place, -3, 50.0, ms=20.0, waited=20.0 * place) for place in range(6)]
    result = image.earned(view(dict.fromkeys(new, 0), new, {"i": rush}), "i")
    assert result is not None
    assert result.here == pytest.approx(1.2) and result.fixed[-3] == pytest.approx(1.2)
    assert result.fixed[0] == pytest.approx(0.4)
    # What was dropped would have been work too.
    dropped = Event("dropped", 5.1, {"images": 4, "ms": 0.0, "waited": 100.0, "slack": -20.0, "earns": [2.0, 4.0]})
    dropped.values["costs"] = [5.0, 25.0]
    more = image.earned(view(dict.fromkeys(new, 0), new, {"i": [*rush, dropped]}), "i")
    assert more is not None and more.fixed[-3] >= result.fixed[-3]


def test_text_shows_who_answered_and_the_time_that_it_spared() -> None:
    new: dict[str, float] = {
        "t level_texts_total level=1": 30,
        "t level_texts_total level=2": 10,
        "t requests_total code=OK": 40,
    }
    new |= {"t early_share_recent": 0.75, "t early_share_drift": -0.05, "t request_tokens_count": 40}
    events = [Event("text", 5.0, {"level": 1, "confidence": 0.9, "pruned": 0, "ms": 4.0}) for _ in range(3)]
    events.append(Event("text", 6.0, {"level": 2, "confidence": 0.3, "pruned": 2, "ms": 20.0}))
    events.append(Event("text", 6.0, {"level": 2, "confidence": None, "pruned": 0, "ms": 20.0}))
    html = text.draw(view(dict.fromkeys(new, 0), new, {"t": events}), "t")
    assert tiles(html)["answered by the small model"] == "75%"
    assert notes(html)["answered by the small model"] == "80% when it was profiled"
    assert tiles(html)["mean time of a text"] == "10.4 ms"
    assert "about 16 ms if the large model answered all" in notes(html)["mean time of a text"]
    assert "4 texts, on average sure by 75%; 1 went on" in label(html, "How sure")


def test_the_sidecar_says_what_it_decided_and_why() -> None:
    decisions = [{"at": "2026-01-01T10:00:00+00:00", "kind": "reload", "subject": "e", "text": "its process <7> ended"}]
    html = sidecar.draw(view({}, {}, status=STATUS, decisions=decisions), "this server")
    assert tiles(html)["sidecar"] == "watches" and tiles(html)["processes that serve"] == "1 of 2"
    for words in ("10:00:00", "reload", "its process &lt;7&gt; ended", "1 x 32", "texts grew", "e_w00", "dead, 9"):
        assert words in html


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
    events = [Event("load", 4.0, {"adapter": name, "number": 1, "bytes": 1, "ms": 9.0})]
    assert "<script" not in lora.draw(view(new, new, {"g": events}), "g")
    assert "<script" not in sidecar.draw(
        view({}, {}, status=STATUS, decisions=[{"at": name, "kind": name, "subject": name, "text": name}]),
        "this server",
    )
