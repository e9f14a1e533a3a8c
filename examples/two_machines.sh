#!/bin/sh
# Two machines, played by two processes: a producer that prefills and serves, a consumer that is paired with it by a code, pulls what it needs
# and continues it with `decode` alone.    sh examples/two_machines.sh [BUNDLE] [TEXT]
# Each machine is three folders: its store, its settings, and here one work folder that goes away afterwards.
set -eu
bundle=${1:-tiny}
work=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
server=
text=${2:-$work/text.txt}
[ -f "$text" ] || for line in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24; do
    echo "In year $line of the lighthouse the keeper counted the ships, and wrote down how many came and how many stayed away."
done >"$text"

producer() { KVFERRY_STORE=$work/producer KVFERRY_CONFIG=$work/producer.settings kvferry "$@"; }
consumer() { KVFERRY_STORE=$work/consumer KVFERRY_CONFIG=$work/consumer.settings kvferry "$@"; }

echo '== producer: prefill once, and serve'
producer prefill --bundle "$bundle" "$text" --name lighthouse
KVFERRY_STORE=$work/producer KVFERRY_CONFIG=$work/producer.settings \
    kvferry serve --tls --port 0 --no-log --json >"$work/serving.json" &
server=$!
until [ -s "$work/serving.json" ]; do sleep 0.1; done
address=$(sed -n 's/.*"address": "\(.*\)".*/\1/p' "$work/serving.json")
host_and_port=${address#https://}

echo '== producer: a code for one device'
code=$(producer pair --host 127.0.0.1 --port "${host_and_port##*:}" --json | sed -n 's/.*"code": "\(.*\)".*/\1/p')
echo "$code"

echo '== consumer: paired by that code, pulls only what continuing needs'
consumer pair "$code" --at "$host_and_port"
consumer pull "$address" lighthouse --trimmed

echo '== consumer: decode only, the same continuation as the producer'
consumer verify lighthouse --bundle "$bundle"
consumer generate --bundle "$bundle" --from lighthouse --decode-only -n 16
