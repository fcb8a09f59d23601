#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# Runs Redis in directory $1 under $2 requests of each kind, then stops it.
set -e
socket="$1/redis.sock"
redis-server --port 0 --unixsocket "$socket" --save "" --appendonly no --dir "$1" --daemonize no >"$1/redis.log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true' EXIT
for _ in $(seq 100); do
	test -S "$socket" && break
	sleep 0.1
done
redis-benchmark -s "$socket" -q -c 20 -d 65536 -r 1000 -n "$2" -t set,get >"$1/benchmark.log"
