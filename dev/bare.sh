#!/bin/sh
# bare.sh - runs the README's commands as a newcomer would, in a Debian that has nothing installed and nothing set.
#
#   sh dev/bare.sh [SYSTEM] [COMMAND]
#
#   SYSTEM    bookworm (default) or trixie; with /arm64 that system for another processor, which qemu-user and binfmt_misc emulate
#   COMMAND   what to run in a fresh clone of HEAD; by default the commands under "Two commands" in README.md
#
# debootstrap makes the system in a temporary folder, in about half a minute, from $DEBIAN_MIRROR (http://deb.debian.org/debian). The
# script copies this machine's certificates and its settings of apt and pip into it, because a machine behind a proxy needs them.
# Mounts and processes live in namespaces of their own and end with this script. After SIGKILL only the temporary folder remains.
#
# Needs root, debootstrap and unshare. Where one of them is missing, the command runs on this machine, in a fresh clone.
#
# Exit status: that of COMMAND; 2 if the system cannot be made.
set -u
here=$(cd -- "$(dirname -- "$0")" && pwd)
fail() { echo "error: $*" >&2; exit 2; }

# ---- inside the namespaces ----
# --in ROOT SYSTEM COMMAND
if [ "${1-}" = --in ]; then
    root=$2 suite=${3%/*} arch= command=$4
    [ "$suite" = "$3" ] || arch=--arch=${3#*/}
    # shellcheck disable=SC2086 # an option or nothing
    debootstrap $arch --variant=minbase "$suite" "$root" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$root.log" 2>&1 ||
        { tail -n 5 "$root.log" >&2; fail "debootstrap could not make $3"; }
    # This machine may need these to reach package hosts.
    for from in /etc/ssl/certs /usr/local/share/ca-certificates /etc/pip.conf /etc/apt/apt.conf /etc/apt/apt.conf.d; do
        [ ! -e "$from" ] || { mkdir -p "$root${from%/*}" && cp -a "$from" "$root${from%/*}"; } || exit 2
    done
    # Every installed system has this file.
    [ -e "$root/etc/hosts" ] || printf '127.0.0.1 localhost\n::1 localhost\n' >"$root/etc/hosts"
    mount -t proc proc "$root/proc" && mount --rbind /sys "$root/sys" && mount --rbind /dev "$root/dev" &&
        mount -t tmpfs tmpfs "$root/dev/shm" || fail "$root cannot be given proc, sys and dev"
    clone=/root/shard.c
    git clone -q --no-hardlinks "$here/.." "$root$clone" || exit 2
    # In an environment that contains only the proxies and the place of the certificates.
    set -- sh -c "cd $clone && $command"
    for name in SSL_CERT_FILE PIP_CERT http_proxy https_proxy no_proxy; do
        eval "value=\${$name-}"
        [ -z "$value" ] || set -- "$name=$value" "$@"
    done
    chroot "$root" env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM="${TERM:-dumb}" "$@"
    exit
fi

# ---- outside ----
# README's commands, without their comments, each on a line.
commands() { sed -n '/^## Two commands/,/^## /s/^    \(sh dev[^#]*[^# ]\) *#.*/\1/p' "$here/../README.md"; }
case ${1-} in
    -h | --help) sed -n '2,17s/^# \{0,1\}//p' "$0"; printf '\nThe default COMMAND:\n\n%s\n' "$(commands)"; exit ;;
    -*) fail "bare.sh has no options, such as '$1'" ;;
esac
system=${1:-bookworm} command=${2-}
[ $# -le 2 ] || fail "COMMAND is one argument: quote it"
case $system in bookworm | trixie | bookworm/arm64 | trixie/arm64) ;; *)
    fail "SYSTEM must be bookworm or trixie, or one of them with /arm64, not '$system'" ;;
esac
if [ -z "$command" ]; then
    # Each prints its time, and ends the script if it fails.
    command=$(commands | sed 's/.*/begin=$(date +%s); & || exit; echo "# $(($(date +%s) - begin)) s: &"/')
    [ -n "$command" ] || fail "README.md has no commands under 'Two commands'"
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/bare.XXXXXX") || exit 2
child=
# The namespaces end with their first process, and their mounts with them: in this one the folder has none.
clean() {
    [ -z "$child" ] || kill -9 "$child" 2>/dev/null
    wait
    rm -rf --one-file-system "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# A shell makes commands in the background ignore Ctrl-C, and tests of Ctrl-C must not: hence --default-signal below.
lacks=
for tool in debootstrap unshare setpriv chroot git; do command -v $tool >/dev/null || lacks="there is no $tool"; done
[ "$(id -u)" = 0 ] || lacks="you are not root"
[ -n "$lacks" ] || said=$(unshare --mount --pid --fork true 2>&1) || lacks="the kernel gives no namespaces ($said)"
if [ -n "$lacks" ]; then
    echo "no bare $system, because $lacks: the command runs on this machine, in a fresh clone" >&2
    git clone -q --no-hardlinks "$here/.." "$work/shard.c" || exit 2
    begin=$(date +%s) where="this machine, NOT a bare $system"
    env --default-signal=INT sh -c "cd '$work/shard.c' && $command" &
else
    mkdir "$work/root"
    begin=$(date +%s) where="bare $system"
    env --default-signal=INT setpriv --pdeathsig KILL unshare --mount --propagation private --pid --fork --kill-child sh "$0" --in "$work/root" "$system" "$command" &
fi
child=$!
wait $child
status=$?
child=
echo "# $where: $(($(date +%s) - begin)) s, status $status: ${2-README's two commands}"
exit $status
