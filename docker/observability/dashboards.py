"""The dashboards of Grafana: one of all models, and one for each technique.

`python -m docker.observability.dashboards` writes grafana/*.json from what stands here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = Path(__file__).parent / "grafana"
_SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
_WIDTH, _HEIGHT = 8, 7
# Of a series: the models and servers that the dashboard is set to.
_OURS = 'instance=~"$instance", model=~"$model"'


class Panel(NamedTuple):
    """What one panel draws.

    question     that it answers
    expressions  by the name of their lines, in which {{label}} stands for a label
    is_heatmap   whether the one expression gives counts by `le`
    """

    title: str
    question: str
    unit: str
    expressions: Mapping[str, str]
    is_heatmap: bool = False


class Board(NamedTuple):
    """One dashboard. models: metrics that only its models have, joined by |; rows: panels by the row's title."""

    title: str
    models: str
    rows: Mapping[str, Sequence[Panel]]


def series(name: str, labels: str = "") -> str:
    return f"shapeshift_{name}{{{_OURS}{labels and ', '}{labels}}}"


def rate(name: str, *by: str, labels: str = "") -> str:
    """A counter's growth a second, of all processes of a model together."""
    return f"sum by ({', '.join(('model', *by))}) (rate({series(name, labels)}[$__rate_interval]))"


def gauge(name: str, *by: str, how: str = "sum") -> str:
    """A gauge of the processes that are alive: a killed one leaves its last value."""
    alive = f"and on (instance, model, pid) rate({series('heartbeat_total')}[$__rate_interval]) > 0"
    return f"{how} by ({', '.join(('model', *by))}) ({series(name)} {alive})"


def quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le')})"


def times(title: str, question: str, name: str) -> Panel:
    """How long something takes: half of them, and nearly all."""
    shares = {"half": 0.5, "98%": 0.98}
    return Panel(
        title, question, "ms", {f"{{{{model}}}} {text}": quantile(share, name) for text, share in shares.items()}
    )


def sizes(title: str, question: str, name: str) -> Panel:
    """How often each size of something comes."""
    expression = f"sum by (le) (increase({series(f'{name}_bucket')}[$__rate_interval]))"
    return Panel(title, question, "", {"{{le}}": expression}, is_heatmap=True)


def rates(title: str, question: str, *by: str, unit: str = "cps", **names: str) -> Panel:
    """Counters; names: what to call each in the legend."""
    return Panel(title, question, unit, {_legend(text, by): rate(name, *by) for text, name in names.items()})


def gauges(title: str, question: str, *by: str, unit: str = "short", how: str = "max", **names: str) -> Panel:
    """Gauges; names: what to call each in the legend."""
    return Panel(title, question, unit, {_legend(text, by): gauge(name, *by, how=how) for text, name in names.items()})


def shares(title: str, question: str, part: str, whole: str) -> Panel:
    """One sum over another."""
    return Panel(title, question, "percentunit", {"{{model}}": f"{part} / {whole}"})


def _legend(text: str, by: Sequence[str]) -> str:
    words = ["{{model}}", *(f"{{{{{label}}}}}" for label in by), text.strip("_").replace("_", " ")]
    return " ".join(word for word in words if word)


_CODES = f"{rate('requests_total', 'code')} > 0"
_REFUSED = rate("requests_total", labels='code="UNAVAILABLE"')
_PROPOSED = f"({rate('spec_decode_num_draft_tokens_total')} > 0)"
_TRAFFIC = (
    Panel("Requests", "How many are answered, and how?", "cps", {"{{model}} {{code}}": _CODES}),
    times("Time of a request", "How long from arrival to the answer?", "request_latency_ms"),
    gauges(
        "Waiting and running", "Is it overloaded?", how="sum", waiting="requests_waiting", running="requests_running"
    ),
)
_LENGTHS = sizes("Length in tokens", "How long are texts? Compare with `length_histogram`", "request_tokens")
_FIRST = times("First token", "How long does a client look at nothing?", "first_token_ms")
_BETWEEN = times("Between tokens", "How evenly does text come?", "between_tokens_ms")
_SLOTS = gauges(
    "Slots", "Are there enough?", slots="slots", taken="requests_running", waiting="requests_waiting", how="sum"
)
_GATEWAY = {
    "{{status}}": "sum by (status) (rate(shapeshift_gateway_answers_total[$__rate_interval]))",
    "running": "sum(shapeshift_gateway_requests_running)",
    "broken lines of keys": "sum(shapeshift_gateway_broken_key_lines)",
    "{{key}} beyond {{limit}}": "sum by (key, limit) (rate(shapeshift_gateway_rate_limited_total[$__rate_interval]))",
}
_GATEWAY_TOKENS = {
    f"{{{{model}}}} {{{{key}}}} {what}": f"sum by (model, key) (rate(shapeshift_gateway_{name}[$__rate_interval]))"
    for what, name in {"read": "prompt_tokens_total", "generated": "generation_tokens_total"}.items()
}
_GATEWAY_TIMES = {
    f"{{{{model}}}} {what}": "histogram_quantile(0.98, sum by (model, le)"
    f" (rate(shapeshift_gateway_{name}_ms_bucket[$__rate_interval])))"
    for what, name in {"request": "request_latency", "first": "first_token", "between": "between_tokens"}.items()
}
_ALIVE = f"count by (model) (rate({series('heartbeat_total')}[$__rate_interval]) > 0)"
_CERTIFICATES = {"{{instance}}": 'shapeshift_certificate_expiry_timestamp_seconds{instance=~"$instance"} - time()'}
_CLASS_WAIT = f"{rate('class_wait_seconds_total', 'slo_class')} / {rate('class_started_total', 'slo_class')}"

_OVERVIEW = {
    "Traffic": (
        *_TRAFFIC,
        shares("Refused", "Which share finds no room? An alert begins at 1%", _REFUSED, rate("requests_total")),
        _LENGTHS,
        rates("Overtakes", "Do urgent classes go first?", _="overtakes_total"),
        gauges("Waiting, by class", "Which class waits?", "slo_class", _="class_waiting"),
        Panel("Wait, by class", "How long does each class wait?", "s", {"{{model}} {{slo_class}}": _CLASS_WAIT}),
        rates("Overtaken", "How often do later ones go before each class?", "slo_class", _="class_overtaken_total"),
        Panel("Gateway", "What does it answer?", "cps", _GATEWAY),
        Panel("Tokens of keys", "Who uses how many?", "cps", _GATEWAY_TOKENS),
        Panel(
            "Times at the gateway", "How long do 98% wait: for all, the first token, the next?", "ms", _GATEWAY_TIMES
        ),
    ),
    "Processes": (
        Panel("Alive", "How many processes does a model have? None: it is dead", "short", {"{{model}}": _ALIVE}),
        gauges("Stalled threads", "Does a thread hang that has work?", "thread", unit="s", _="thread_stalled_seconds"),
        Panel("Metrics page", "Does it answer?", "short", {"{{job}} {{instance}}": 'up{job=~"triton|gateway"}'}),
    ),
    "Fleet": (
        gauges("Nodes", "How many serve a model?", _="fleet_nodes"),
        rates("Forwarded", "Which node serves requests of another?", "node", _="requests_forwarded_total"),
        gauges("On other nodes", "How many run there?", how="sum", _="requests_on_other_nodes"),
        Panel("Certificates", "How long are they valid?", "s", _CERTIFICATES),
    ),
}
_POLYMORPH = {
    "Texts": (
        *_TRAFFIC,
        _LENGTHS,
        rates("Texts computed", "How many?", _="engine_rows_total"),
        Panel(
            "Texts in a call",
            "Do texts share engine calls?",
            "short",
            {"{{model}}": f"{rate('engine_rows_total')} / {rate('engine_calls_total')}"},
        ),
    ),
    "Engines": (
        rates("Calls by engine", "Which lengths are used?", "engine", _="engine_used_total"),
        rates("Time by engine", "Which are busy? 1: always", "engine", unit="percentunit", _="engine_seconds_total"),
        gauges("Engines in use", "Are all loaded?", how="sum", _="engines_loaded"),
    ),
    "Workers": (
        gauges("Joined", "How many workers get texts?", _="workers_joined"),
        gauges("Outstanding texts", "Is the work even?", "worker", how="sum", _="worker_outstanding"),
        gauges("Outside the engine", "Is a worker slow to reach?", "worker", unit="ms", _="worker_delay_ms"),
        gauges("Time for others", "Is it shared?", "worker", unit="percentunit", _="worker_foreign_share"),
        rates(
            "Work",
            "What do workers answer, and what is tried again?",
            calls="worker_calls_total",
            texts="worker_rows_total",
            texts_tried_again="retries_total",
            calls_given_up="timeouts_total",
        ),
        gauges("Time-outs in a row", "Does a worker answer? An alert begins at 2", "worker", _="worker_timeouts"),
    ),
}
_TOKEN_ADAPT = {
    "Images": (
        *_TRAFFIC,
        rates("Images by outcome", "How many are in time?", "outcome", _="images_total"),
        rates("Utility", "What are the answers in time worth?", unit="short", _="utility_total"),
        rates("Images by gamma", "How much is computed for each? 0: all tokens", "gamma", _="gamma_images_total"),
    ),
    "Batches": (
        sizes("Images in a batch", "Do requests share batches?", "batch_images"),
        times("Planning", "How long does it take?", "plan_ms"),
        gauges("Measured over profiled time", "Do predicted times hold? Above 1: slower", _="cost_factor"),
    ),
    "Registry": (
        gauges("Tasks", "How many are served?", _="tasks"),
        rates("Refused entries", "Is an entry wrong?", _="tasks_refused_total"),
    ),
}
_FUSED_DECODE = {
    "Requests": (*_TRAFFIC, _LENGTHS),
    "Generation": (
        _FIRST,
        _BETWEEN,
        rates("Tokens", "How fast?", generated="generated_tokens_total", of_prompts="prompt_tokens_total"),
        _SLOTS,
        gauges("Keys and values", "Which share of the memory is in use?", unit="percentunit", _="kv_cache_usage"),
        rates("Preempted", "How many requests lost their slots?", _="preemptions_total"),
        gauges("Tokens in slots", "How much context is held?", how="sum", _="slot_tokens"),
        shares(
            "Shared beginnings",
            "Which share of the prompt tokens was there already?",
            rate("prefix_cache_hits_total"),
            rate("prefix_cache_queries_total"),
        ),
        shares(
            "Proposed tokens",
            "Which share of them does the model choose? Empty where none is proposed",
            rate("spec_decode_num_accepted_tokens_total"),
            _PROPOSED,
        ),
        times("Iteration", "How long does a step of all slots take?", "iteration_ms"),
        rates(
            "What the generating thread does",
            "How many milliseconds of each second?",
            "part",
            unit="ms",
            _="iteration_part_ms_total",
        ),
    ),
}
_ADAPTER_CACHE = {
    "Requests": (*_TRAFFIC, _FIRST, _BETWEEN, _SLOTS),
    "Adapters": (
        shares(
            "Found in memory",
            "Which share of the requests finds its adapter there?",
            rate("adapter_hits_total"),
            f"({rate('adapter_hits_total')} + {rate('adapter_misses_total')})",
        ),
        gauges("Adapters", "How many are in memory?", resident="adapters_resident", known="adapters_known"),
        gauges("Room", "How much is free?", unit="bytes", _="adapter_vacant_bytes"),
        times("Load", "How long does it take?", "adapter_load_ms"),
        rates(
            "Loads",
            "What is loaded, from where, and what fails?",
            loads="adapter_load_ms_count",
            from_the_host="adapter_host_loads_total",
            failed="adapter_load_failures_total",
        ),
        rates("Bytes loaded", "How busy is the disk?", unit="Bps", _="adapter_loaded_bytes_total"),
        rates("Evictions", "Why do adapters leave?", "why", _="adapter_evictions_total"),
        Panel(
            "Ten busiest adapters",
            "Which ones are asked for?",
            "cps",
            {"{{model}} {{adapter}}": f"topk(10, {rate('adapter_requests_total', 'adapter')})"},
        ),
        gauges(
            "In use",
            "Which adapters run, and which wait?",
            *("running_lora_adapters", "waiting_lora_adapters"),
            how="count",
            _="lora_requests_info",
        ),
    ),
    "Queues": (
        gauges("Waiting", "Which sizes wait?", "queue", how="sum", _="adapter_queue_requests"),
        gauges("Quota", "How many tokens may each queue hold?", "queue", _="adapter_queue_quota_tokens"),
        rates(
            "Overtaking",
            "How many pass the head of a queue, and are put back for it?",
            passed="adapter_bypasses_total",
            put_back="adapter_squashes_total",
        ),
    ),
    "Registry": (rates("Refused entries", "Is an entry wrong?", _="adapter_refusals_total"),),
}
_CASCADE = {
    "Levels": (
        *_TRAFFIC,
        rates("Texts by level", "How many does the small model answer?", "level", _="level_texts_total"),
        gauges(
            "Answered by level 1",
            "Which share recently, and how far is that from the profile?",
            unit="percentunit",
            share="early_share_recent",
            minus_the_profile="early_share_drift",
        ),
        gauges(
            "Confidence of level 1",
            "Is the traffic still like the sample? Far from the profile: profile again",
            unit="percentunit",
            mean="confidence_recent",
            minus_the_profile="confidence_drift",
            goes_on_up_to="first_level_threshold",
        ),
    ),
    "Later levels": (
        rates(
            "Calls",
            "How many, and how do they end?",
            answered="level_calls_total",
            failed="level_failures_total",
            timed_out="level_timeouts_total",
            texts_that_fell_back="fallbacks_total",
        ),
        gauges("Calls that run", "Does a level lag?", how="sum", _="level_calls_running"),
        rates("Words left out", "How much do later levels not read?", _="words_pruned_total"),
    ),
    "Candidate": (
        times("Control", "What do dispatch, pruning and ensemble take for a text?", "control_ms"),
        gauges(
            "Profiled accuracy",
            "What does the profile promise?",
            unit="percentunit",
            cascade="profiled_accuracy",
            last_level_alone="profiled_last_level_accuracy",
        ),
        gauges("Profiled time", "What does a text cost in each level?", "level", unit="ms", _="profiled_level_ms"),
        rates(
            "Changes", "Was the candidate replaced?", replaced="candidate_swaps_total", failed="candidate_errors_total"
        ),
    ),
}
BOARDS = {
    "overview": Board("Shapeshift", "heartbeat_total", _OVERVIEW),
    "polymorph": Board("Shapeshift: texts (polymorph)", "engine_rows_total|workers_joined", _POLYMORPH),
    "token_adapt": Board("Shapeshift: images (token_adapt)", "cost_factor", _TOKEN_ADAPT),
    "fused_decode": Board("Shapeshift: generation (fused_decode)", "slots", _FUSED_DECODE),
    "adapter_cache": Board("Shapeshift: adapters (adapter_cache)", "adapters_known", _ADAPTER_CACHE),
    "cascade": Board("Shapeshift: cascades (cascade)", "early_share_recent", _CASCADE),
}


def _panel(panel: Panel) -> Any:
    drawn = heatmap.Panel() if panel.is_heatmap else timeseries.Panel().unit(panel.unit).fill_opacity(10)
    drawn = drawn.title(panel.title).description(panel.question).datasource(_SOURCE).span(_WIDTH).height(_HEIGHT)
    if isinstance(drawn, heatmap.Panel):
        drawn = drawn.color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues"))
    for number, (name, expression) in enumerate(panel.expressions.items()):
        target = prometheus.Dataquery().expr(expression).legend_format(name).ref_id("ABCDEFGH"[number])
        drawn = drawn.with_target(target.format(PromQueryFormat.HEATMAP) if panel.is_heatmap else target)
    return drawn


def _variables(board: Board) -> list[Any]:
    def values_of(label: str, selector: str) -> Any:
        query = dashboard.QueryVariable(label).label(label).datasource(_SOURCE)
        query = query.query(f"label_values({selector}, {label})").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        return query.multi(True).include_all(True)

    metric = f'__name__=~"shapeshift_({board.models})"'
    return [
        dashboard.DatasourceVariable("datasource").label("data source").type("prometheus"),
        values_of("instance", f"{{{metric}}}"),
        values_of("model", f'{{{metric}, instance=~"$instance"}}'),
    ]


def built(name: str) -> str:
    """The file of a dashboard, in Grafana's JSON."""
    board = BOARDS[name]
    made = dashboard.Dashboard(board.title).uid(f"shapeshift-{name.replace('_', '-')}").tags(["shapeshift"])
    made = made.time("now-30m", "now").refresh("10s").timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR)
    made = made.variables(_variables(board))
    numbers = itertools.count(1)
    for title, panels in board.rows.items():
        made = made.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            made = made.with_panel(_panel(panel).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def main() -> None:
    for name in BOARDS:
        (FOLDER / f"{name}.json").write_text(built(name))


if __name__ == "__main__":
    main()
