#!/usr/bin/env bash
# Stop what start_slurm.sh started, by the pid files it left: bash stop_slurm.sh STATE_DIR. Ends within half a minute.
set -uo pipefail
state=${1:?usage: stop_slurm.sh STATE_DIR}
export SLURM_CONF="$state/etc/slurm.conf"
daemons="munged slurmctld slurmd"

# Jobs first: their processes outlive slurmd.
if [ -s "$state/run/slurmctld.pid" ] && [ -n "$(timeout 5 squeue -h 2>/dev/null)" ]; then
  timeout 5 scancel --quiet --user="$(id -un)" 2>/dev/null
  for _ in $(seq 1 20); do
    [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break
    sleep 0.5
  done
fi

running() { # the pids of our files that still belong to a daemon of SLURM's: a number may have been given away since
  for file in "$state"/run/*.pid; do
    pid=$(cat "$file" 2>/dev/null) || continue
    case " $daemons " in *" $(cat "/proc/$pid/comm" 2>/dev/null) "*) echo "$pid" ;; esac
  done
}

for signal in TERM KILL; do
  pids=$(running)
  [ -z "$pids" ] && break
  # shellcheck disable=SC2086
  kill -$signal $pids 2>/dev/null
  for _ in $(seq 1 30); do
    [ -z "$(running)" ] && break
    sleep 0.1
  done
done
exit 0
