#!/bin/sh
# cluster.sh - a cluster on one machine: each node has its own network, host name, shared memory and sshd, and you choose how slow
# the links of the switch are. Nodes are Linux namespaces; they share all files, as on a cluster's shared disk.
#
#   sh dev/cluster/cluster.sh up NODES RANKS_PER_NODE LINK   for example: up 4 1 1gbit,200us      (make cluster)
#   sh dev/cluster/cluster.sh link NODE|all LINK             changes the links of these nodes; NODE may be 2,3
#   sh dev/cluster/cluster.sh on NODE COMMAND...             runs a command on a node
#   sh dev/cluster/cluster.sh sent                           prints the bytes that each node has sent, as the kernel counts them
#   sh dev/cluster/cluster.sh slurm                          starts Slurm: munged and slurmd on each node, slurmctld on node 0
#   sh dev/cluster/cluster.sh down                           ends all processes, and leaves nothing behind   (make cluster-down)
#
#   dev/cluster/run PROGRAM [OPTION...]                      starts a rank for each slot of each node, by mpirun and ssh
#
# LINK is words separated by commas: RATE (1gbit, 500mbit or unlimited), DELAY from one node to the next (200us, 1ms), loss=5%, down
# or up, and part=N, which divides the network into parts that do not hear each other. Omitted properties do not change.
#
# Node I is called nodeI; its address 10.77.0.(I+1) exists only in the cluster. Needs Linux, ip (package iproute2), unshare and
# nsenter (util-linux), sshd (openssh-server), Open MPI and a C compiler; root, or a kernel that lets ordinary users create
# namespaces. The cluster's folder is build/cluster, so a clone has one cluster at a time unless CLUSTER=FOLDER (no spaces) is set.
set -eu
from=$PWD
cd "$(dirname -- "$0")/../.."
usage() { sed -n '2,22s/^# \{0,1\}//p' dev/cluster/cluster.sh; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
state=${CLUSTER:-$PWD/build/cluster}
port=2222
is_up() { case $(readlink "/proc/$(cat "$state/pid" 2>/dev/null)/exe") in */unshare) ;; *) return 1 ;; esac; }
need_up() { is_up || fail "there is no cluster: make cluster NODES=4 makes one"; }
# need_tools TOOL...; await TENTHS COMMAND...: false if the command does not succeed within this many tenths of a second.
need_tools() {
    for tool; do
        PATH=$PATH:/usr/sbin:/sbin command -v $tool >/dev/null ||
            fail "there is no $tool; sh dev/setup.sh --with-cluster installs what a cluster needs"
    done
}
await() {
    tries=$1
    shift
    until "$@"; do tries=$((tries - 1)); [ $tries -gt 0 ] || return 1; sleep 0.1; done
}
is_number() { case $1 in ''|*[!0-9]*|0?*) return 1 ;; esac; }

# enter NODE COMMAND...: runs it in the namespaces of the node's first process.
enter() {
    export PATH="$PATH:/usr/sbin:/sbin" SLURM_CONF="$state/slurm/slurm.conf"
    node=$(cat "$state/node$1.pid" 2>/dev/null) || fail "there is no node $1"
    shift
    as=
    [ "$(id -u)" = 0 ] || as="-U --preserve-credentials"
    # shellcheck disable=SC2086
    nsenter -t "$node" $as -n -u -m -p -- sh -c 'cd "$0" && exec "$@"' "$from" "$@"
}

# ---- links ----
# changed_links NODE|all LINK: prints the lines on stdin, one per node, with the link of that node changed.
changed_links() {
    awk -v which="$1" -v words="$2" '
        function number(text, pattern) { if (text !~ "^[0-9.]+" pattern "$") exit wrong = 2; return text + 0 }
        BEGIN { many = split(words, word, ",") }
        which != "all" && index("," which ",", "," NR - 1 ",") == 0 { print; next }
        {
            for (i = 1; i <= many; i++) {
                w = word[i]
                if (w ~ /bit$/) $1 = number(w, "[kmg]bit") * (w ~ /kbit/ ? 1e3 : w ~ /mbit/ ? 1e6 : 1e9)
                else if (w == "unlimited") $1 = 0
                else if (w ~ /[0-9]s$|[um]s$/) $2 = number(w, "[um]?s") * (w ~ /us/ ? 1e-6 : w ~ /ms/ ? 1e-3 : 1)
                else if (sub(/^loss=/, "", w)) $3 = number(w, "%") / 100
                else if (w == "down" || w == "up") $4 = w == "down"
                else if (sub(/^part=/, "", w)) $5 = number(w, "")
                else exit wrong = 2
            }
            print
        }
        END { exit wrong }' || fail "LINK must be like 1gbit,200us,loss=5%, or down, up, unlimited, part=1; not '$2'"
}
# set_links NODE|all LINK: changes the file that the switch reads.
set_links() {
    changed_links "$@" <"$state/links" >"$state/links.new"
    mv "$state/links.new" "$state/links"
}

# ---- up ----
check_rights() {
    # shellcheck disable=SC2086
    said=$(unshare $rights --net --pid --fork --mount true 2>&1) || fail "this kernel gives $(id -un) no namespaces ($said): be root$(
        [ "$(id -u)" = 0 ] && echo " outside a container, or of one with more rights (docker run --privileged)" ||
        echo ", or let it (sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0)")"
}
has_started() { [ -e "$state/ready" ] || ! kill -0 $unshared 2>/dev/null; }
up() {
    nodes=$1 ranks=$2 link=$3 rights=
    is_number "$nodes" && [ "$nodes" -ge 1 ] && [ "$nodes" -le 64 ] || fail "NODES must be from 1 to 64, not '$nodes'"
    is_number "$ranks" && [ "$ranks" -ge 1 ] || fail "RANKS_PER_NODE must be a whole number from 1 on, not '$ranks'"
    echo "0 0 0 0 0" | changed_links all "$link" >/dev/null
    case $state in *[!A-Za-z0-9_./,:@%+=~-]*)
        fail "mpirun and ssh's settings cannot name a folder such as '$state': CLUSTER=/tmp/cluster, for example, puts it elsewhere" ;; esac
    ! is_up || fail "there is a cluster in $state already: make cluster-down ends it"
    [ "$(id -u)" = 0 ] || rights="--user --map-current-user --keep-caps"
    need_tools ip unshare nsenter sshd ssh ssh-keygen mpirun
    check_rights
    rm -rf "$state"
    mkdir -p "$state"
    chmod 700 "$state"
    i=0
    while [ $i -lt "$nodes" ]; do
        echo "0 0 0 0 0" >>"$state/links"
        echo "10.77.0.$((i + 1)) node$i" >>"$state/hosts"
        echo "node$i slots=$ranks" >>"$state/hostfile"
        i=$((i + 1))
    done
    echo "127.0.0.1 localhost" >>"$state/hosts"
    set_links all "$link"
    ${CC:-cc} -std=gnu11 -O2 -Wall -Wextra dev/cluster/switch.c -o "$state/switch"
    ssh-keygen -q -t ed25519 -N '' -C cluster -f "$state/key"
    ssh-keygen -q -t ed25519 -N '' -C cluster -f "$state/host_key"
    echo "node*,10.77.0.* $(cut -d ' ' -f 1,2 "$state/host_key.pub")" >"$state/known_hosts"
    sed "s|^ *||; s|STATE|$state|" >"$state/ssh_config" <<END
        Host *
        Port $port
        User $(id -un)
        IdentityFile STATE/key
        IdentitiesOnly yes
        UserKnownHostsFile STATE/known_hosts
        LogLevel ERROR
        BatchMode yes
END
    # The first process is the cluster: when it ends, the kernel ends all others and removes networks and mounts.
    # shellcheck disable=SC2086
    setsid unshare $rights --mount --net --pid --fork --kill-child --mount-proc \
        env CLUSTER="$state" sh dev/cluster/cluster.sh init "$nodes" >"$state/log" 2>&1 </dev/null &
    unshared=$!
    echo $unshared >"$state/pid"
    await 300 has_started || true
    [ -e "$state/ready" ] || { said=$(tail -n 3 "$state/log"); down; fail "the cluster does not start: $said"; }
    # The processes have different numbers inside; out here they are grandchildren.
    first=$(pgrep -P $unshared)
    for i in $(seq 0 $((nodes - 1))); do pgrep -P "$first" -f "cluster.sh node $i\$" >"$state/node$i.pid"; done
    echo "$nodes nodes, node0 to node$((nodes - 1)), of $ranks rank$([ "$ranks" = 1 ] || echo s) each; links: $link"
    echo "next: dev/cluster/run ./train_gpt2_ddp   (make cluster-down ends the cluster)"
}

# Process 1 of the cluster, in the switch's network.
init() {
    PATH=$PATH:/usr/sbin:/sbin
    mount --make-rprivate /
    ip link set lo up
    for i in $(seq 0 $(($1 - 1))); do
        unshare --net --uts --mount sh dev/cluster/cluster.sh node "$i" &
        until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done
        address=$(printf '02:00:00:00:00:%02x' "$i")
        ip link add "node$i" mtu 9000 type veth peer name eth0 mtu 9000 address "$address" gso_max_segs 1 netns $!
        ip link set "node$i" up
    done
    until [ "$(cat /proc/net/dev | grep -c node)" = "$1" ]; do sleep 0.01; done
    "$state/switch" "$state/links" "$1" &
    for i in $(seq 0 $(($1 - 1))); do
        until [ -e "$state/node$i.up" ]; do sleep 0.01; done
    done
    : >"$state/ready"
    while [ -e "$state/ready" ]; do sleep 1; done # rm -rf build also ends the cluster
}
# The first process of a node, in its own namespaces.
node() {
    PATH=$PATH:/usr/sbin:/sbin
    hostname "node$1" 2>/dev/null || echo "node$1" >/proc/sys/kernel/hostname
    until grep -q eth0 /proc/net/dev; do sleep 0.01; done
    echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 2>/dev/null || true
    ip link set lo up
    ip address add "10.77.0.$(($1 + 1))/24" dev eth0
    ip link set eth0 up
    mount -t tmpfs tmpfs /dev/shm
    mount -t tmpfs tmpfs /run
    mkdir -p /run/sshd
    mount --bind "$state/hosts" /etc/hosts
    "$(command -v sshd)" -D -e -4 -p $port -f /dev/null -h "$state/host_key" -o AuthorizedKeysFile="$state/key.pub" \
        -o StrictModes=no -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o UsePAM=no -o PidFile=none \
        -o MaxStartups=100 &
    : >"$state/node$1.up"
    wait
}

# ---- Slurm ----
slurm_is_idle() { [ "$(sh dev/cluster/cluster.sh on 0 sinfo -h -N -t idle 2>/dev/null | grep -c .)" = "$nodes" ]; }
slurm() {
    need_tools munged slurmctld slurmd
    nodes=$(grep -c . "$state/hostfile") slots=$(sed -n '1s/.*=//p' "$state/hostfile") me=$(id -un)
    [ ! -e "$state/slurm" ] || fail "Slurm is there already"
    mkdir -p "$state/slurm/spool"
    dd if=/dev/urandom of="$state/slurm/munge.key" bs=128 count=1 2>/dev/null
    chmod 600 "$state/slurm/munge.key"
    # A requeued job waits until its old credential expires (by default two minutes), and then for the scheduler.
    sed "s|^ *||; s|STATE|$state/slurm|" >"$state/slurm/slurm.conf" <<END
        ClusterName=cluster
        SlurmctldHost=node0
        SlurmUser=$me
        SlurmdUser=$me
        AuthType=auth/munge
        AuthInfo=socket=/run/munge.socket,cred_expire=5
        CredType=cred/munge
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        SelectType=select/cons_tres
        SelectTypeParameters=CR_Core
        SchedulerParameters=sched_interval=1,bf_interval=1
        MpiDefault=pmix
        ReturnToService=2
        StateSaveLocation=STATE/spool
        SlurmdSpoolDir=/run/slurmd
        SlurmdPidFile=/run/slurmd.pid
        SlurmctldPidFile=/run/slurmctld.pid
        SlurmctldLogFile=STATE/slurmctld.log
        SlurmdLogFile=STATE/%n.log
        NodeName=node[0-$((nodes - 1))] CPUs=$slots State=UNKNOWN
        PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
    # With two kinds of fences, the default, a rank may leave the second before another leaves the first; MPI_Init then crashes.
    printf 'PMIxCliTmpDirBase=/run\nPMIxCollFence=tree\n' >"$state/slurm/mpi.conf"
    for i in $(seq 0 $((nodes - 1))); do
        enter "$i" munged --force --key-file "$state/slurm/munge.key" --socket /run/munge.socket --pid-file /run/munged.pid \
            --log-file "$state/slurm/munged$i.log" --seed-file "$state/slurm/seed$i"
        [ "$i" != 0 ] || enter 0 slurmctld -f "$state/slurm/slurm.conf"
        enter "$i" slurmd -f "$state/slurm/slurm.conf" -N "node$i"
    done
    await 300 slurm_is_idle || fail "Slurm does not start: see $state/slurm/slurmctld.log"
    echo "Slurm has $nodes nodes of $slots task$([ "$slots" = 1 ] || echo s); next: sh dev/cluster/cluster.sh on 0 sbatch dev/launch/slurm.sh"
}

# ---- down ----
is_gone() { ! kill -0 "$1" 2>/dev/null; }
down() {
    if [ -r "$state/pid" ]; then
        if is_up; then kill -9 "$(cat "$state/pid")"; fi
        for pid in $(cat "$state"/node*.pid 2>/dev/null); do # processes that entered a namespace end with its first process
            await 50 is_gone "$pid" || true
        done
    fi
    left=$(pgrep -f -- "$state/(switch|host_key)" || true)
    [ -z "$left" ] || fail "still running: $left"
    rm -rf "$state"
}

case ${1-} in
    up) [ $# = 4 ] || usage 1; up "$2" "$3" "$4" ;;
    link) [ $# = 3 ] || usage 1; need_up; set_links "$2" "$3"; pkill -HUP -f "^$state/switch " ;;
    on) [ $# -ge 3 ] || usage 1; need_up; shift; enter "$@" ;;
    sent) need_up
        for file in "$state"/node*.pid; do
            i=${file##*/node} i=${i%.pid}
            enter "$i" awk -v i="$i" '/eth0:/ { print "node" i, $10 }' /proc/net/dev
        done ;;
    slurm) need_up; slurm ;;
    down) down ;;
    init) init "$2" ;;
    node) node "$2" ;;
    -h|--help) usage 0 ;;
    *) usage 1 ;;
esac
