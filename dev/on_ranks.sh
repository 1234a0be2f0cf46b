# on_ranks.sh - how scripts start ranks on this machine, decided in this one place. Sourced; the script has fail().
#
# Open MPI's mpirun refuses root, and more ranks than cores, unless an option allows it. It binds each rank to one core, which keeps
# OpenMP's threads from the other cores, unless an option says otherwise. Other launchers have other options: they get none.
#
# MPIRUN  the whole command instead, to which "-np N PROGRAM" is added

mpirun_is=
is_open_mpi() { # asks mpirun only once
    [ -n "$mpirun_is" ] ||
        case $(mpirun --version 2>/dev/null) in *"Open MPI"*|*OpenRTE*|*PRRTE*) mpirun_is=open-mpi ;; *) mpirun_is=other ;; esac
    [ "$mpirun_is" = open-mpi ]
}
# mpirun for whoever runs this, on nodes whose slots somebody has counted.
mpirun_command() {
    if [ -n "${MPIRUN:-}" ]; then echo "$MPIRUN"
    elif [ "$(id -u)" = 0 ] && is_open_mpi; then echo "mpirun --allow-run-as-root"
    else echo mpirun; fi
}

# ranks_launcher N: sets launcher to the command that starts N ranks here, and launcher_why to the reasons for its options.
ranks_launcher() {
    launcher_why=
    if [ -n "${MPIRUN:-}" ]; then launcher=$MPIRUN launcher_why='MPIRUN says so'; return; fi
    if ! is_open_mpi; then launcher=mpirun; return; fi
    cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
    [ "$(id -u)" != 0 ] || launcher_why='you are root'
    [ "$1" -le "$cores" ] ||
        launcher_why="${launcher_why:+$launcher_why; }there are more ranks than the $cores core$([ "$cores" = 1 ] || echo s)"
    launcher="$(mpirun_command) --oversubscribe --bind-to none"
}

# on_ranks N COMMAND...: N processes.
# shellcheck disable=SC2086 # a command and its options
on_ranks() { ranks_launcher "$1"; $launcher -np "$@"; }

# ranks_can_start N: says in a line how ranks are started; ends the script if N processes that do nothing cannot be.
ranks_can_start() {
    ranks_launcher "$1"
    command -v "${launcher%% *}" >/dev/null ||
        fail "there is no ${launcher%% *}, which starts the ranks; sh dev/setup.sh installs Open MPI, or set MPIRUN to another launcher"
    if said=$(on_ranks "$1" true 2>&1); then
        echo "ranks are started by: $launcher -np $1${launcher_why:+  ($launcher_why)}" >&2
        return
    fi
    fail "$launcher did not start $1 ranks; make doctor tells what this machine has, and MPIRUN names another launcher
or other options, such as MPIRUN='mpirun --allow-run-as-root --oversubscribe'${said:+
It said:
}$(printf %s "$said" | sed 's/^/    /')"
}
