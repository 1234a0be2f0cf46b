# on_ranks.sh - how scripts start ranks, and what they say where that cannot be. Sourced; the script has fail().
#
# MPIRUN  default mpirun --oversubscribe --bind-to none: a laptop may have fewer cores than ranks

launcher=${MPIRUN:-mpirun --oversubscribe --bind-to none}
# shellcheck disable=SC2086 # a command and its options
on_ranks() { ranks=$1; shift; $launcher -np "$ranks" "$@"; }

# ranks_can_start N: ends the script if N processes that do nothing cannot be started.
ranks_can_start() {
    command -v "${launcher%% *}" >/dev/null ||
        fail "there is no ${launcher%% *}, which starts ranks; sh dev/setup.sh installs Open MPI, and MPIRUN may name another launcher"
    if said=$(on_ranks "$1" true 2>&1); then return; fi
    printf '%s\n' "$said" | sed 's/^/    /' >&2
    case $said in
        *root*) fail "mpirun does not start programs for root; be another user or, in a container," \
            "set MPIRUN=\"mpirun --allow-run-as-root --oversubscribe\"" ;;
        *slots*) fail "$launcher refuses $1 ranks, more than this machine has cores; add --oversubscribe to MPIRUN" ;;
        *) fail "$launcher did not start $1 ranks, and says above why; make doctor tells what this machine has" ;;
    esac
}
