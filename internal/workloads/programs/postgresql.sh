#!/bin/sh
# SPDX-License-Identifier: Apache-2.0 OR MIT
# PostgreSQL from $1 with its data in directory $2: makes a database if $3 is
# "init", otherwise runs it under pgbench for $3 seconds.
set -e
PATH="$1:$PATH"
export PGHOST="$2" PGDATABASE=postgres
start() {
	pg_ctl -D "$2/db" -l "$2/log" -w -o "-c listen_addresses= -c unix_socket_directories=$2" start >/dev/null
	trap 'pg_ctl -D "'"$2"'/db" -m fast -w stop >/dev/null' EXIT
}
if test "$3" = init; then
	initdb -D "$2/db" -A trust -N >/dev/null
	start "$@"
	pgbench -i -s 10 -q >/dev/null 2>&1
	exit 0
fi
start "$@"
pgbench -c 4 -T "$3" >"$2/pgbench.log" 2>&1
