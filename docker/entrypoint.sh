#!/usr/bin/env bash
# Starts tritonserver in a container with the options of `shapeshift serve`: models are loaded by name only, and model
# control, shared memory, trace and logging need the key. Further arguments are passed to tritonserver.
# With `sidecar` or `gateway` as the first argument it starts that instead, for the server of the same pod.
#   MODELS      models to load, separated by commas; empty: all of the repository. Workers are the sidecar's to load.
#   REPOSITORY  folder that `make engines` generated
#   KEY_FILE    file with the key, 32 hexadecimal digits
set -euo pipefail

repository=${REPOSITORY:-/opt/shapeshift/build/repository}
key_file=${KEY_FILE:-/run/secrets/shapeshift_key}

fail() {
    printf 'entrypoint: %s\n' "$1" >&2
    exit 2
}

[[ -r $key_file ]] || fail "no key that uid $(id -u) can read at $key_file"
key=$(tr -d '[:space:]' <"$key_file")
[[ $key =~ ^[0-9a-f]{32}$ ]] || fail "$key_file does not hold 32 hexadecimal digits"

if [[ ${1:-} == sidecar || ${1:-} == gateway ]]; then
    export SHAPESHIFT_KEY=$key
    exec python3 -m shapeshift.cli.main "$1" --build "${BUILD:-/tmp/build}" "${@:2}"
fi

# The same choice as that of `make serve`.
chosen=$(python3 -m shapeshift.cli.main serve --print-models --repository "$repository" ${MODELS:+--models "$MODELS"}) || exit 2
readarray -t names <<<"$chosen"

restriction="model-repository,shared-memory,trace,logging:shapeshift-key=$key"
# `make engines` has completed the configurations: the server need not start each process once more for that.
# All interfaces of the container: compose.yaml publishes them on the host's loopback address only.
exec tritonserver \
    --model-repository="$repository" \
    --model-control-mode=explicit \
    --disable-auto-complete-config \
    --backend-config=python,thread-pool-size=128 \
    "${names[@]/#/--load-model=}" \
    --http-restricted-api="$restriction" \
    --grpc-restricted-protocol="$restriction" \
    --exit-timeout-secs="${EXIT_TIMEOUT_S:-20}" \
    --allow-sagemaker=false \
    --allow-vertex-ai=false \
    "$@"
