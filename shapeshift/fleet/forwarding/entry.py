"""The entry of a front whose server is a node of a fleet: each request is served on the node that is best for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shapeshift import __version__
from shapeshift.errors import CancelledRequestError, InvalidInputError, ModelGoneError, NotFoundError
from shapeshift.fleet.forwarding.peers import Peers
from shapeshift.fleet.forwarding.relay import HeldRequest, Relay
from shapeshift.fleet.node_clients import NodeClients
from shapeshift.fleet.policy.placement import LOOK_S, least_unread, least_work
from shapeshift.loops import repeat
from shapeshift.serving import error_codes, events
from shapeshift.serving.bounds import unloading
from shapeshift.serving.description import Description
from shapeshift.serving.front import Front
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Counters, Gauge, Metric
from shapeshift.serving.model_args import FLEET_FILE_VARIABLE, NODE_VARIABLE, fleet_file, own_node
from shapeshift.serving.parameters import FROM_NODE, is_tritons
from shapeshift.serving.pb_utils import InferenceRequest, ResponseSender
from shapeshift.serving.responses import CancellationWatch

_TICK_S = 0.5
# Beyond so many requests on other nodes, further ones are served here.
_MOST_PASSED_ON = 1024


class FleetEntry:
    """Serves a request here, or passes it on to the node that `policy.placement` chooses.

    A request that another node has passed on is served here. One whose node refuses it, or goes before it answers, is
    served here too. others: the same front on the other nodes. Raises ShapeshiftError for a fleet file that cannot be
    read.
    """

    def __init__(self, front: Front[Any], period_s: float = LOOK_S) -> None:
        file, self._here = fleet_file(), own_node()
        if file is None or not self._here:
            allowed = f"the name of this node, beside {FLEET_FILE_VARIABLE}"
            raise InvalidInputError(NODE_VARIABLE, self._here, allowed)
        self._front = front
        self._clients = NodeClients()
        self.others = Peers(front, file, self._here, self._clients, period_s)
        self._watch = CancellationWatch(front.log.error)
        # Two threads may submit here: Triton's, and the event loop for what another node refused.
        self._submitting = threading.Lock()
        self._lock = threading.Lock()
        self._is_closing = False
        self._relays: dict[Relay, None] = {}
        self._passed_on = Counters("requests_forwarded_total", "Requests passed on to another node", "node")
        self.steps = [StepCounter("forwarding", lambda: bool(self._relays))]
        self.metrics: list[Metric] = [
            self._passed_on,
            Gauge("requests_on_other_nodes", "Requests that other nodes serve for this", lambda: len(self._relays)),
            Gauge("fleet_nodes", "Nodes that serve this model", lambda: len(self.others.loads()) + 1),
        ]
        self._ticking = self._clients.start(repeat("forwarding", self._tick, _TICK_S, front.log.error))

    def describe(self) -> Description:
        """What the front is, and its load."""
        affinity = self._front.affinity
        unread_tokens = None if affinity is None else affinity.unread_tokens()
        return replace(self._front.describe(), load=self._front.load(), unread_tokens=unread_tokens)

    def submit(self, request: InferenceRequest, sender: ResponseSender) -> None:
        """Serve a request here or on another node. Raises as the front's `submit` does."""
        stop_ids = self._ids_to_stop(request)
        if stop_ids:
            self._stop(stop_ids[0], request, sender)
        elif (node := self._choose(request)) == self._here:
            self._submit(request, sender)
        else:
            if self._front.affinity is not None:
                self.others.add_unread(node, self._front.affinity.prompt_tokens(request))
            self._pass_on(HeldRequest(self._front.pb_utils, request, sender), node)

    def close(self) -> None:
        """Fail what is in flight, and stop."""
        self._is_closing = True
        self._watch.close()
        self._ticking.cancel()
        self.others.close()
        for relay in list(self._relays):
            relay.cancel(unloading())
        self._clients.close()

    def _submit(self, request: InferenceRequest, sender: ResponseSender) -> None:
        with self._submitting:
            self._front.serve(request, sender)

    def _stop(self, stop_id: object, request: InferenceRequest, sender: ResponseSender) -> None:
        """End the request of the id `stop_id`: one that this node has passed on, one here, or one of another node.

        Its client may have sent it to any node. The others are asked one after the other; they ask no further.
        """
        with self._lock:
            passed_on = [relay for relay in self._relays if relay.id and not relay.is_stop]
        named = next((relay for relay in passed_on if relay.id.encode() == stop_id), None)
        if named is not None:
            held = HeldRequest(self._front.pb_utils, request, sender)
            held.arrays[self._front.stop_id] = np.array([named.id_there.encode()], dtype=object)
            self._pass_on(held, named.node)
            return
        try:
            self._submit(request, sender)
        except NotFoundError:
            others = sorted(self.others.loads())
            if not others or FROM_NODE in request.parameters() or len(self._relays) >= _MOST_PASSED_ON:
                raise
            self._pass_on(HeldRequest(self._front.pb_utils, request, sender), others[0], others[1:])

    def _choose(self, request: InferenceRequest) -> str:
        if FROM_NODE in request.parameters() or len(self._relays) >= _MOST_PASSED_ON:
            return self._here
        loads: Mapping[str, float] = self.others.loads()
        if not loads:
            return self._here
        affinity = self._front.affinity
        if affinity is not None and (key := affinity.key(request)):
            return least_unread(key, {**self.others.unread_tokens(), self._here: affinity.unread_tokens()})
        return least_work({**loads, self._here: self._front.load()}, self._here)

    def _ids_to_stop(self, request: InferenceRequest) -> list[object]:
        """The id of the request that `request` asks to end; nothing for any other request."""
        if not self._front.stop_id:
            return []
        tensor = self._front.pb_utils.get_input_tensor_by_name(request, self._front.stop_id)
        ids: list[object] = [] if tensor is None else tensor.as_numpy().reshape(-1)[:1].tolist()
        return ids

    def _pass_on(self, held: HeldRequest, node: str, further: Sequence[str] = ()) -> None:
        """further: nodes to ask after this one where it refuses, before the request is served here."""
        parameters: dict[str, Any] = {
            name: value for name, value in held.parameter_values.items() if not is_tritons(name) and name != "id"
        }
        parameters[FROM_NODE] = self._here
        relay = Relay(self._front, held, node, parameters, self._ended, partial(self._refused, further))
        with self._lock:
            self._relays[relay] = None
            self.others.count(node, 1)
        self._passed_on.add(node)
        gone = CancelledRequestError("the client cancelled the request")
        self._watch.add(relay, held.get_response_sender().is_cancelled, lambda: relay.cancel(gone))
        relay.start(self._clients.start, self._clients.calling(node))

    def _ended(self, relay: Relay, code: str) -> None:
        self._watch.remove(relay)
        if relay.trace is not None:
            relay.trace.end({"node": relay.node}, code)
        with self._lock:
            del self._relays[relay]
            self.others.count(relay.node, -1)

    def _refused(self, further: Sequence[str], relay: Relay) -> None:
        self._ended(relay, "UNAVAILABLE")
        held = relay.held
        if further and not self._is_closing:
            self._pass_on(held, further[0], further[1:])
            return
        sender = held.get_response_sender()
        try:
            if self._is_closing:
                raise unloading()
            self._submit(held, sender)
        except Exception as error:  # noqa: BLE001  whatever happens, the client is answered
            self._front.responder.fail(sender, error, None, error_codes.is_forwarded(held))

    async def _tick(self) -> None:
        """Count the steps of the event loop, record the nodes, and give up on those that do not answer."""
        self.steps[0].step()
        if events.is_recording():
            here = (self._here, True, self._front.load(), __version__, 0.0)
            events.record_rows("nodes", [here, *self.others.rows()])
        for relay in list(self._relays):
            if self.others.is_stuck(relay.node):
                relay.cancel(ModelGoneError(f"node {relay.node} does not answer; retry later"))
