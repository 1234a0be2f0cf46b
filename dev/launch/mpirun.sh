#!/bin/sh
# mpirun.sh - starts ranks on the nodes of a hostfile, through ssh.
#
#   sh dev/launch/mpirun.sh HOSTFILE PROGRAM [OPTION...]
#
# HOSTFILE has a line for each node, with as many slots as the node has GPUs, or cores to spare:
#
#   node1 slots=4
#   node2 slots=4
#
# Ranks fill the first node, then the next, so the ranks of one --shard-group are neighbours. Each node needs the same folder
# under the same path (a shared file system, which --out also needs), and ssh from the first node without a password.
# RANKS: how many, if fewer than there are slots. INTERFACE: the network interface to use between nodes, where a machine has several. MPIRUN: the launcher (dev/on_ranks.sh).
set -eu
usage() { sed -n '2,13s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
. "$(dirname -- "$0")/../on_ranks.sh"
case ${1-} in -h|--help) usage 0 ;; esac
[ $# -ge 2 ] || usage 1
hosts=$1
shift
[ -r "$hosts" ] || fail "there is no hostfile $hosts; it has lines like: node1 slots=4"
# The sum of the slots, 1 of a node that names none.
ranks=0
for slots in $(sed -nE '/^[ \t]*(#|$)/d; s/.*[ \t]slots=([0-9]+)([ \t].*)?$/\1/; t show
    s/.*/1/; :show
    p' "$hosts"); do ranks=$((ranks + slots)); done
[ "$ranks" -gt 0 ] || fail "$hosts names no node; it has lines like: node1 slots=4"

# Left alone, MPI also picks interfaces that do not lead to the other nodes, such as a container's bridge.
if [ -n "${INTERFACE-}" ]; then
    export NCCL_SOCKET_IFNAME="$INTERFACE"
    set -- --mca btl_tcp_if_include "$INTERFACE" --mca oob_tcp_if_include "$INTERFACE" -x NCCL_SOCKET_IFNAME "$@"
fi
# mpirun passes on only the variables that are named; --bind-to none lets a rank use several cores.
for name in OMP_NUM_THREADS OMP_WAIT_POLICY SHARD_COMM_STRICT NCCL_DEBUG; do
    if printenv "$name" >/dev/null; then set -- -x "$name" "$@"; fi
done
exec $(mpirun_command) --hostfile "$hosts" --map-by slot --bind-to none -np "${RANKS:-$ranks}" "$@"
