#!/bin/sh
# nodes_here.sh - two nodes on one machine, to try out traffic between nodes: two network namespaces joined by a link.
#
#   sh dev/launch/nodes_here.sh RANKS-PER-NODE PROGRAM [OPTION...]
#
# Ranks of a node share memory; ranks of different nodes have only the link, and the last line says how much went over it. Node
# 0 is 10.77.0.1, node 1 10.77.0.2. mpirun starts node 1's ranks through `ip netns exec` where it would otherwise use ssh. Needs
# root, and ip (package iproute2). MPIRUN: the launcher (dev/on_ranks.sh).
set -eu
usage() { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
. "$(dirname -- "$0")/../on_ranks.sh"
case ${1-} in -h|--help) usage 0 ;; esac
[ $# -ge 2 ] || usage 1
per_node=$1
shift
case $per_node in ''|*[!0-9]*|0*) fail "RANKS-PER-NODE must be a whole number from 1 on, not '$per_node'" ;; esac
command -v ip >/dev/null || fail "there is no ip (package iproute2)"

work=$(mktemp -d)
id=shard$$ # begins the names of this run's namespaces
finish() {
    ip netns del "$id-0" 2>/dev/null || true # this also deletes both ends of the link
    ip netns del "$id-1" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM
for node in 0 1; do
    ip netns add "$id-$node" 2>"$work/log" || fail "no network namespace can be made; this needs root: $(cat "$work/log")"
    ip -n "$id-$node" link set lo up
done
ip -n "$id-0" link add link0 type veth peer name link0 netns "$id-1"
for node in 0 1; do
    ip -n "$id-$node" address add "10.77.0.$((node + 1))/24" dev link0
    ip -n "$id-$node" link set link0 up
done

# This agent takes the place of ssh: its first word is the host, the others are a command for the host's shell.
cat > "$work/agent" <<END
#!/bin/sh
shift
exec ip netns exec $id-1 unshare --uts sh -c 'hostname node1; exec sh -c "\$*"' sh "\$@"
END
chmod +x "$work/agent"
ip netns exec "$id-0" $(mpirun_command) --mca plm rsh --mca plm_rsh_agent "$work/agent" --host "10.77.0.1:$per_node,10.77.0.2:$per_node" \
    --mca oob_tcp_if_include link0 --mca btl_tcp_if_include link0 -np $((2 * per_node)) "$@"
sent() { # NODE
    tenths=$((($(ip netns exec "$id-$1" cat /sys/class/net/link0/statistics/tx_bytes) + 50000) / 100000))
    echo "$((tenths / 10)).$((tenths % 10)) MB"
}
echo "over the link: $(sent 0) from node 0, $(sent 1) from node 1"
