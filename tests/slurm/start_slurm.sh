#!/usr/bin/env bash
# Start a real SLURM on this machine alone: munged, slurmctld, and one slurmd for each pretended node with 8 pretended GPUs.
#   bash start_slurm.sh STATE_DIR [NODES]     then:  . STATE_DIR/env.sh      in the end:  bash stop_slurm.sh STATE_DIR
# Everything lives in STATE_DIR, which must be short (paths of Unix sockets end at 108 bytes); nothing in /etc is touched.
# Wants root and Debian's packages slurmctld, slurmd, slurm-client, munge. Gives up after 30 s, and then stops what it started.
set -euo pipefail
PATH=$PATH:/usr/sbin
state=${1:?usage: start_slurm.sh STATE_DIR [NODES]}
nodes=${2:-2}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$state"/{log,save,run,munge,etc,dev}
state=$(cd "$state" && pwd)
chmod 755 "$state"
chmod 700 "$state/munge"
port=${LONGSTRAW_SLURM_PORT:-16817}
host=$(hostname -s)
trap 'code=$?; [ $code = 0 ] || { tail -n 5 "$state"/log/*.log >&2 || true; bash "$here/stop_slurm.sh" "$state"; }; exit $code' EXIT

head -c 128 /dev/urandom >"$state/munge/key"
chmod 600 "$state/munge/key"
timeout 10 munged --force --num-threads=2 --socket="$state/run/munge.sock" --key-file="$state/munge/key" \
  --pid-file="$state/run/munged.pid" --log-file="$state/log/munged.log" --seed-file="$state/munge/seed"

# A GPU wants a character device: a plain file gives no CUDA_VISIBLE_DEVICES.
for gpu in 0 1 2 3 4 5 6 7; do ln -sf /dev/null "$state/dev/gpu$gpu"; done
echo "Name=gpu Type=h20 File=$state/dev/gpu[0-7]" >"$state/etc/gres.conf"

# cred_expire: a requeued job waits that long. GraceTime: from SIGTERM to SIGKILL where a job is preempted.
cat >"$state/etc/slurm.conf" <<CONF
ClusterName=straw
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$state/run/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$state/save
SlurmdSpoolDir=$state/spool/%n
SlurmctldPidFile=$state/run/slurmctld.pid
SlurmdPidFile=$state/run/slurmd.%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,default_queue_depth=1000,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=10
MinJobAge=300
KillWait=5
MaxArraySize=4
MaxJobCount=1000
CONF
for node in $(seq 1 "$nodes"); do
  mkdir -p "$state/spool/node$node"
  echo "NodeName=node$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + node)) CPUs=8 RealMemory=16000 Gres=gpu:h20:8"
done >>"$state/etc/slurm.conf"
cat >>"$state/etc/slurm.conf" <<CONF
PartitionName=h20 Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=10 PreemptMode=OFF
CONF

export SLURM_CONF="$state/etc/slurm.conf"
timeout 10 slurmctld -c -f "$SLURM_CONF"
for node in $(seq 1 "$nodes"); do timeout 10 slurmd -f "$SLURM_CONF" -N "node$node"; done
echo "export SLURM_CONF=$SLURM_CONF" >"$state/env.sh"

for _ in $(seq 1 60); do
  idle=$(timeout 5 sinfo -h -N -p h20 -o '%T' 2>/dev/null | grep -c '^idle$' || true)
  if [ "$idle" = "$nodes" ]; then
    echo "slurm: $nodes nodes are up"
    exit 0
  fi
  sleep 0.25
done
echo "slurm: the nodes did not come up" >&2
exit 1
