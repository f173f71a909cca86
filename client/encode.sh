#!/usr/bin/env bash
# Sentence embedding with curl: client/encode.sh "some text" [http://localhost:8000]
# Prints the server's JSON. Retries with growing pauses on 503 (unavailable) and on nothing else.
set -euo pipefail

text=${1:?usage: client/encode.sh TEXT [URL]}
url=${2:-http://localhost:8000}
timeout_s=10
attempts=5
pause_s=0.2

# JSON strings must escape these characters.
text=${text//\\/\\\\}
text=${text//\"/\\\"}
text=${text//$'\n'/\\n}
text=${text//$'\r'/\\r}
text=${text//$'\t'/\\t}

body='{"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["'$text'"]}],
       "outputs": [{"name": "EMBEDDING"}],
       "parameters": {"truncate": true}}'

for ((attempt = 1; ; attempt++)); do
    # The answer, then a line with the HTTP status.
    answer=$(curl --silent --show-error --max-time "$timeout_s" --write-out '\n%{http_code}' \
        --header 'Content-Type: application/json' --data-binary @- "$url/v2/models/encode/infer" <<<"$body")
    status=${answer##*$'\n'}
    answer=${answer%$'\n'*}
    if [[ $status == 200 ]]; then
        printf '%s\n' "$answer"
        exit 0
    fi
    if [[ $status != 503 || $attempt -ge $attempts ]]; then
        printf 'HTTP %s: %s\n' "$status" "$answer" >&2
        exit 1
    fi
    sleep "$(awk -v p="$pause_s" -v n="$attempt" -v r="$RANDOM" \
        'BEGIN { print p * 2 ^ (n - 1) * (0.5 + r / 65536) }')"
done
