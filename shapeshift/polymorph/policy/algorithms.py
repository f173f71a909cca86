"""The algorithms of allocation and dispatch by name, imported when a setting names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shapeshift.settings import Choices

# Each takes a `problem.Problem` and returns the counts, None where no counts meet the cap. `global` is the exact
# solution too: its caller passes the demand of the whole trace, once.
ALLOCATIONS: Choices[Callable[[Any], Sequence[int] | None]] = Choices(
    "allocation",
    {
        "exact": "shapeshift.polymorph.policy.allocate_exact:solve",
        "gurobi": "shapeshift.polymorph.policy.baselines.allocate_gurobi:solve",
        "even": "shapeshift.polymorph.policy.allocate:even",
        "global": "shapeshift.polymorph.policy.allocate_exact:solve",
    },
)

# Each is a class: (max_lengths, services_ms, `dispatch.Rules`) to what `dispatcher.Dispatcher` offers.
DISPATCHERS: Choices[Callable[..., Any]] = Choices(
    "dispatch",
    {
        "earliest_finish": "shapeshift.polymorph.policy.dispatcher:Dispatcher",
        "multilevel": "shapeshift.polymorph.policy.dispatcher:Dispatcher",
        "intra_group": "shapeshift.polymorph.policy.dispatcher:Dispatcher",
        "inter_group": "shapeshift.polymorph.policy.dispatcher:Dispatcher",
        "bin_packing": "shapeshift.polymorph.policy.baselines.binpacking:Packer",
    },
)
