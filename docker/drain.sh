#!/usr/bin/env bash
# Runs before a node's server is stopped: waits until the other nodes have left it out and it holds no request.
#   DRAIN_S      most seconds, the first wait included
#   LEAVE_S      the first wait: two look-ups of the members, 5 s apart
#   METRICS_URL  the server's metrics page
set -uo pipefail

leave=${LEAVE_S:-10}
sleep "$leave"
exec python3 -c '
import sys
from shapeshift.fleet.own_node import await_idle
await_idle(sys.argv[1], float(sys.argv[2]) - float(sys.argv[3]), sys.stderr.write)
' "${METRICS_URL:-http://127.0.0.1:8002/metrics}" "${DRAIN_S:-120}" "$leave"
