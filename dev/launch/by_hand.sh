#!/bin/sh
# by_hand.sh - starts a node's ranks without a launcher, and sets the variables that torchrun would set, by which ranks find each
# other. NCCL needs nothing else, so this works on GPUs. On the CPU, ranks communicate by MPI, which needs mpirun or srun.
#
#   sh dev/launch/by_hand.sh NODE NODES RANKS-PER-NODE ADDRESS:PORT PROGRAM [OPTION...]
#
# Run it once on each node: NODE is 0 on the first, 1 on the second, and so on. ADDRESS is the address of node 0, on which PORT and
# PORT + 1 must be free. With PyTorch installed, you can run this command on each node instead, which does the same:
#
#   torchrun --no-python --nnodes NODES --node-rank NODE --nproc-per-node RANKS-PER-NODE --master-addr ADDRESS --master-port PORT PROGRAM ...
#
# Only rank 0 reports progress; errors name their rank. The script ends when all ranks of the node have ended. Its status is 0, or
# that of a rank that failed. It passes USR1, which makes a run save and stop, on to the ranks.
set -eu
usage() { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
case ${1-} in -h|--help) usage 0 ;; esac
[ $# -ge 5 ] || usage 1
node=$1 nodes=$2 per_node=$3 meeting=$4
shift 4
for number in "$node" "$nodes" "$per_node"; do
    case $number in ''|*[!0-9]*) fail "NODE, NODES and RANKS-PER-NODE must be whole numbers, not '$number'" ;; esac
done
[ "$node" -lt "$nodes" ] && [ "$per_node" -ge 1 ] ||
    fail "NODE must be at most $((nodes - 1)) with $nodes nodes, not $node, and RANKS-PER-NODE at least 1, not $per_node"
case $meeting in ?*:[0-9]*) ;; *) fail "ADDRESS:PORT must be like 10.0.0.1:29500, not '$meeting'" ;; esac

export MASTER_ADDR="${meeting%:*}" MASTER_PORT="${meeting##*:}" WORLD_SIZE=$((nodes * per_node)) LOCAL_WORLD_SIZE="$per_node"
ranks=''
trap 'kill $ranks 2>/dev/null || true' EXIT
trap 'exit 1' HUP INT TERM
trap 'kill -USR1 $ranks' USR1
LOCAL_RANK=0
while [ "$LOCAL_RANK" -lt "$per_node" ]; do
    export LOCAL_RANK RANK=$((node * per_node + LOCAL_RANK))
    "$@" &
    ranks="$ranks $!"
    LOCAL_RANK=$((LOCAL_RANK + 1))
done
status=0
for rank in $ranks; do
    code=0
    wait "$rank" || code=$?
    while [ "$code" -gt 128 ] && kill -0 "$rank" 2>/dev/null; do code=0; wait "$rank" || code=$?; done # a signal ends wait early
    [ "$code" = 0 ] || status=$code
done
ranks=''
exit "$status"
