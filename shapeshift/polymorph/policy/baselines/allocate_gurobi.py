"""The allocation problem (Eqs. 1-7) as a model for Gurobi, as in the paper: a check of the exact solution.

C^2 <= t N is a cone, so affine curves give a convex model. Tables and queues need Gurobi's global search.
Gurobi's free licence allows 2000 variables, more than any model here.
"""

from __future__ import annotations

from typing import Any

from shapeshift.errors import UnsupportedError
from shapeshift.polymorph.policy.curves import FULL_LOAD, MD1, OVERLOAD_SLOPE, Affine, Clamped, Curve, Table
from shapeshift.polymorph.policy.problem import Problem

_SETTINGS = {"OutputFlag": 0, "Threads": 1, "MIPGap": 1e-8, "FeasibilityTol": 1e-9, "IntFeasTol": 1e-9}


def solve(problem: Problem) -> list[int] | None:
    """The best counts N_i, to Gurobi's tolerances; None where no counts meet the cap.

    Raises UnsupportedError where Gurobi is missing, has no licence for a model of this size, or stops early.
    """
    try:
        import gurobipy
    except ImportError as error:
        raise UnsupportedError("algorithm: gurobi needs the package gurobipy; install it, or use exact") from error
    try:
        with gurobipy.Env(params=_SETTINGS) as env, gurobipy.Model(env=env) as model:
            workers = _build(model, problem, gurobipy.GRB)
            model.optimize()
            if model.Status in (gurobipy.GRB.INFEASIBLE, gurobipy.GRB.INF_OR_UNBD):
                return None
            if model.Status != gurobipy.GRB.OPTIMAL:
                raise UnsupportedError(f"algorithm: gurobi stopped with status {model.Status}; use exact")
            return [round(count.X) for count in workers]
    except gurobipy.GurobiError as error:
        raise UnsupportedError(f"algorithm: gurobi: {error}; use exact, which needs no licence") from error


def _build(model: Any, problem: Problem, grb: Any) -> list[Any]:
    total = sum(problem.demand)
    lower = problem.lower_bounds()
    last = len(lower) - 1
    workers = [model.addVar(lb=least, ub=problem.gpus, vtype=grb.INTEGER) for least in lower]
    model.addConstr(sum(workers) == problem.gpus)
    left: Any = 0.0
    costs = []
    for index, (demand, capacity, curve) in enumerate(
        zip(problem.demand, problem.capacity, problem.curves, strict=True)
    ):
        served = model.addVar(ub=total)
        handed_on = model.addVar(ub=total if index < last else 0.0)
        model.addConstr(served + handed_on == left + demand)
        if index < last or problem.cap_last:
            model.addConstr(served <= capacity * workers[index])
        if index < last:
            # Eq. 4: a runtime hands on only what exceeds its capacity.
            full = model.addVar(vtype=grb.BINARY)
            model.addConstr((full == 1) >> (served >= capacity * workers[index]))
            model.addConstr((full == 0) >> (handed_on <= 0.0))
        most = capacity if index < last else total / max(lower[index], 1)
        costs.append(_cost(model, curve, served, workers[index], max(most, 1.0)))
        left = handed_on
    model.setObjective(sum(costs), grb.MINIMIZE)
    return workers


def _cost(model: Any, curve: Curve, served: Any, workers: Any, most: float) -> Any:
    """served x the curve's latency at served / workers, to be minimised; most: bound of that quotient."""
    if isinstance(curve, Affine | Clamped):
        square = model.addVar()
        model.addConstr(served * served <= square * workers)
        if isinstance(curve, Clamped):
            model.addConstr(square >= served)
        return curve.service / 2.0 * (square + served)
    load = model.addVar(ub=most)
    model.addConstr(load * workers == served)
    if isinstance(curve, MD1):
        latency: Any = _queue(model, curve, load, most)
    elif isinstance(curve, Table):
        latency = model.addVar(lb=-float("inf"))
        knots = sorted({0.0, *(float(b) for b in range(1, len(curve.values) + 1) if b < most), most})
        model.addGenConstrPWL(load, latency, knots, [curve.latency(b) for b in knots])
    else:
        raise UnsupportedError(
            f"algorithm: gurobi has no model of {type(curve).__name__}; use exact, which supports any curve"
        )
    cost = model.addVar(lb=-float("inf"))
    model.addConstr(cost >= latency * served)
    return cost


def _queue(model: Any, curve: MD1, load: Any, most: float) -> Any:
    share = model.addVar(ub=most / curve.most)
    model.addConstr(share * curve.most == load)
    queue = model.addVar(ub=FULL_LOAD)
    model.addGenConstrMin(queue, [share], FULL_LOAD)
    # ratio = queue / (1 - queue)
    ratio = model.addVar(ub=FULL_LOAD / (1.0 - FULL_LOAD))
    model.addConstr(ratio * (1.0 - queue) == queue)
    return curve.service * (1.0 + ratio / 2.0 + OVERLOAD_SLOPE * (share - queue))
