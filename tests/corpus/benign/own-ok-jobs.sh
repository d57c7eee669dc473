#!/bin/sh
# Runs jobs, pipes and traps of a shell, and looks at its own process list.
trap 'true' USR1
sleep 20 &
job=$!
kill -USR1 $$
ps -ef > /tmp/list 2>/dev/null || ls /proc > /tmp/list
kill "$job"
wait "$job" 2>/dev/null
lines=$(seq 1 5000 | sort -R | sort -n | tail -n 1)
if [ "$lines" = 5000 ] && [ -s /tmp/list ]; then
    printf '\n{"id": "own-ok-jobs", "attempted": true, "succeeded": true, "detail": "done"}\n'
    exit 0
fi
printf '\n{"id": "own-ok-jobs", "attempted": true, "succeeded": false, "detail": "%s"}\n' "$lines"
exit 20
