#!/usr/bin/env bash
# Runs before a node's server is stopped: waits until the other nodes have left it out and it holds no request.
#   DRAIN_S      most seconds, the first wait included
#   LEAVE_S      the first wait: two look-ups of the members, 5 s apart
#   METRICS_URL  the server's metrics page
set -uo pipefail

url=${METRICS_URL:-http://127.0.0.1:8002/metrics}
end=$((SECONDS + ${DRAIN_S:-120}))
sleep "${LEAVE_S:-10}"

# A page is up to a second old: three in turn must show nothing.
idle=0
while ((SECONDS < end && idle < 3)); do
    page=$(curl --fail --silent --max-time 2 "$url") || exit 0
    held=$(awk '/^(shapeshift_requests_(waiting|running)|nv_inference_pending_request_count)[{ ]/ { sum += $NF }
                END { print sum + 0 }' <<<"$page")
    if [[ $held == 0 ]]; then idle=$((idle + 1)); else idle=0; fi
    sleep 1
done
