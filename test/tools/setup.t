#!/bin/bash
# dev/setup.sh asks for the right packages, only for what is missing, and only where it may; where something is in its way it
# says so in one line. With a fake apt, sudo and id, so nothing is installed. A header that does not compile stands for a
# library that is missing.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
absent=$(sh dev/doctor.sh < /dev/null | sed '/^For GPUs/,$d; /Chromium/d' | grep -im 1 -e missing -e unusable)
[ -z "$absent" ] || { echo "1..0 # SKIP only where everything is installed:$absent"; exit 0; }
export FAKES=$work NVCC=no-such-nvcc
bin=$work/bin disk=$work/disk
mkdir "$bin" "$work/broken" "$disk"
chmod 755 "$work" # other users also work here

fake() { printf '#!/bin/sh\n%s\n' "$2" > "$bin/$1"; chmod +x "$bin/$1"; }
# apt-get notes what it is asked for; installing makes Jansson whole.
whole_apt() { fake apt-get 'echo "$@" >> "$FAKES/asked"; case "$1" in install) rm -f "$FAKES/broken/jansson.h" ;; esac'; }
whole_apt
fake apt-cache 'case "$1" in policy) echo "  Candidate: ${CANDIDATE:-1.0}" ;; depends) echo "  Depends: clang-77" ;; esac'
fake sudo 'exit 1'
user() { fake id "case \"\$1\" in -un) echo $2 ;; *) echo $1 ;; esac"; }
break_jansson() { echo '#error not here' > "$work/broken/jansson.h"; }

# A copy of the scripts for most of the tests: its nvidia/ is not this clone's, and it needs little, so that it is quick.
copy=$work/copy
mkdir -p "$copy/dev"
cp -r dev/*.sh dev/doctor "$copy/dev"
sed -i -E '/^(openmp|onednn|pcre2|cmocka|mpi|prove|sanitizer|fuzzer|curl|python|chromium) +\|/d' "$copy/dev/doctor/probes.sh"

# setup STATUS [VARIABLE=VALUE...]: runs the copy with the fakes first on the PATH; what it says goes to $work/said. `with` is a
# command that runs it, as another user or with another disk.
with=()
setup() {
    local expected=$1 status
    shift
    rm -f "$work/asked"
    touch "$work/asked"
    "${with[@]}" env PATH="${TOOLS:-$bin:$PATH}" CPATH="$work/broken" CI=true "$@" /bin/sh "${SCRIPT:-$copy/dev/setup.sh}" ${OPTION-} \
        > "$work/said" 2>&1 < /dev/null
    status=$?
    cat "$work/said" "$work/asked"
    [ "$status" -eq "$expected" ]
}
says() { grep -qe "$1" "$work/said" || { echo "it did not say '$1'"; return 1; }; }
asked() { grep -qxe "$1" "$work/asked" || { echo "apt-get was not asked '$1'"; return 1; }; }
asked_nothing() { [ ! -s "$work/asked" ]; }
# explains LINE APT: LINE comes before what apt printed, and that is indented.
explains() {
    says "$1" && not grep -q "^$2" "$work/said" && grep -A 1 -e "$1" "$work/said" | tail -n 1 | grep -qe "^    $2"
}

nothing_missing_needs_no_rights() { SCRIPT=dev/setup.sh setup 0 && says '^everything is here$' && asked_nothing; }
root_installs_what_is_missing_and_no_more() {
    break_jansson
    setup 0 && says 'missing: Jansson' && says 'everything is here now' && asked 'update -q' &&
        asked 'install -y -q --no-install-recommends libjansson-dev' && [ "$(wc -l < "$work/asked")" -eq 2 ]
}
chromium_is_asked_for() { # where it is the only thing that is missing
    local script=$work/browser/dev/setup.sh
    mkdir "$work/browser" && cp -r "$copy/dev" "$work/browser" && grep '^chromium ' dev/doctor/probes.sh > "$work/line" &&
        sed -i "/^components()/,/^END/{/^make /r $work/line
            }" "$work/browser/dev/doctor/probes.sh" &&
        echo 'probe_chromium() { [ -e "$FAKES/chromium" ] || { echo none; return 1; }; }' >> "$work/browser/dev/doctor/probes.sh" &&
        fake apt-get 'echo "$@" >> "$FAKES/asked"; case "$1" in install) touch "$FAKES/chromium" ;; esac' || return 1
    SCRIPT=$script setup 0 && says '^everything is here$' && asked_nothing && SCRIPT=$script OPTION=--with-chromium setup 0 &&
        says 'missing: Chromium (optional)' && asked 'install -y -q --no-install-recommends chromium' && whole_apt &&
        OPTION=--with-firefox setup 1 && says "^error: setup.sh has no option but --with-chromium, not '--with-firefox'$"
}
a_failed_installation_fails() {
    break_jansson
    fake apt-get 'echo "$@" >> "$FAKES/asked"
        [ "$1" = update ] || { echo "E: Broken packages" >&2; exit 100; }'
    setup 1 && explains '^apt-get install failed: see below\. Then run sh dev/setup.sh again$' 'E: Broken' &&
        says 'still missing' && says 'missing: Jansson, needed for .*: #error not here$'
}
# As apt 2.6 does it: update ends well.
no_network() {
    break_jansson
    fake apt-get 'echo "$@" >> "$FAKES/asked"
        echo "Err:1 http://deb.debian.org/debian bookworm InRelease"
        echo "  Temporary failure resolving '"'deb.debian.org'"'"
        case "$1" in
            update) echo "W: Failed to fetch http://deb.debian.org/debian/dists/bookworm/InRelease  Temporary failure" >&2 ;;
            *) echo "E: Failed to fetch http://deb.debian.org/debian/pool/j.deb  Temporary failure resolving" >&2; exit 100 ;;
        esac'
    setup 1 && explains '^apt-get update failed: no network; .*Going on with the package lists that are here$' 'W: Failed' &&
        explains '^apt-get install failed: no network; check it .*again$' 'E: Failed' && asked 'install .*libjansson-dev'
}
no_lists() {
    break_jansson
    setup 1 CANDIDATE="(none)" && says '^without new package lists, apt knows no package libjansson-dev$' &&
        not grep -q '^install' "$work/asked" && fake apt-get 'echo "$@" >> "$FAKES/asked"' && setup 1 CANDIDATE="(none)" &&
        says '^this release has no package libjansson-dev: install it in another way$'
}
a_full_disk_keeps_what_is_required() {
    break_jansson
    fake gnuplot 'exit 1'
    fake apt-get 'echo "$@" >> "$FAKES/asked"
        case "$*" in
            *gnuplot*) echo "E: You don'"'"'t have enough free space in /var/cache/apt/archives/." >&2; exit 100 ;;
            install*) rm -f "$FAKES/broken/jansson.h" ;;
        esac'
    setup 0 && explains '^apt-get install failed: a disk is full; free some space (df -h shows where)' 'E: You' &&
        says '^what is missing is optional; the rest works without it$' && [ "$(grep -c 'missing: Jansson' "$work/said")" -eq 1 ]
    local result=$?
    rm -f "$bin/gnuplot"
    return $result
}
another_apt_is_running() {
    break_jansson
    fake apt-get '[ "$1" = update ] ||
        { echo "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (apt)" >&2; exit 100; }'
    setup 1 && explains '^apt-get install failed: another program is installing packages; wait' 'E: Could'
}
a_user_without_a_terminal_gets_the_command() {
    break_jansson
    setup 1 && says '^sudo wants a password, and there is no terminal' &&
        says "^    sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends libjansson-dev'$" && asked_nothing
}
a_user_with_sudo_uses_it() {
    break_jansson
    fake sudo 'shift; exec "$@"'
    setup 0 && asked 'install -y -q --no-install-recommends libjansson-dev'
}
in_a_terminal() { # SUDO: a fake that knows no `sudo -n`
    break_jansson
    fake sudo "$1"
    env PATH="$bin:$PATH" CPATH="$work/broken" script -qec "sh $copy/dev/setup.sh" /dev/null < /dev/null > "$work/said" 2>&1
    local status=$?
    tr -d '\r' < "$work/said" > "$work/plain" && mv "$work/plain" "$work/said"
    cat "$work/said"
    return $status
}
a_user_whom_sudo_refuses_is_told() {
    not in_a_terminal 'echo "Sorry, ada may not run sudo here." >&2; exit 1' &&
        says '^sudo does not let ada install packages; ask' && says '^    apt-get update && apt-get install'
}
a_user_with_a_password_installs() {
    : > "$work/asked"
    in_a_terminal 'case "$1" in -n) exit 1 ;; -v) echo "password for ada:" ;; *) exec "$@" ;; esac' && says 'password for ada' &&
        asked 'install .*libjansson-dev' && says 'everything is here now'
}
the_fuzzers_library_is_of_clangs_version() {
    SCRIPT=dev/setup.sh setup 0 CLANG=no-such-clang && asked 'install .* clang libclang-rt-77-dev'
}

# tools NAME...: a PATH without package managers and sudo, with the fakes of these names; no compiler either.
tools() {
    local tool
    rm -rf "$work/tools"
    mkdir "$work/tools"
    for tool in awk cat chmod cut dd df dirname env grep head id ls mktemp paste rm sed sh tail timeout tr; do
        ln -s "$(command -v "$tool")" "$work/tools/$tool"
    done
    for tool in "$@"; do rm -f "$work/tools/$tool"; cp "$bin/$tool" "$work/tools/$tool"; done
}
other_systems_get_their_own_names() {
    fake dnf ''
    fake pacman ''
    fake brew ''
    tools dnf id sudo
    TOOLS=$work/tools SCRIPT=dev/setup.sh setup 1 CC=no-such-cc && asked_nothing &&
        says '^this script installs with apt only; here, run:$' && says '^    sudo dnf install gcc make .*onednn-devel jansson-devel pcre2-devel' || return 1
    tools pacman id
    TOOLS=$work/tools setup 1 CC=no-such-cc && says "^    su -c 'pacman -S --needed gcc make jansson gnuplot'$" || return 1
    tools brew id
    TOOLS=$work/tools setup 1 CC=no-such-cc && says '^    brew install gcc make jansson gnuplot$'
}
an_unknown_system_gets_debians_names() {
    tools id
    TOOLS=$work/tools setup 1 CC=no-such-cc && says '^there is no apt-get, dnf, pacman or brew here; ' &&
        says '^    gcc libc6-dev make libjansson-dev gnuplot-nox$'
}
without_sudo_su_is_named() {
    tools apt-get apt-cache id
    TOOLS=$work/tools setup 1 CC=no-such-cc && says '^only root may install packages, and there is no sudo here' &&
        says "^    su -c 'apt-get update && apt-get install .* gcc libc6-dev make libjansson-dev gnuplot-nox'$" && asked_nothing
}

# old_compiler WHAT: a cc that calls itself gcc 4.8.5 and does WHAT with its arguments before the real one gets them.
old_compiler() { fake old_cc "[ \"\$1\" != --version ] || { echo 'gcc (GCC) 4.8.5'; exit; }; $1; exec cc \"\$@\""; }
an_old_compiler_is_named() {
    old_compiler 'set -- -D__builtin_mul_overflow=gcc_5_has_it "$@"'
    setup 1 CC=old_cc &&
        says '^not usable: C compiler, .*: gcc (GCC) 4.8.5 does not compile what is needed (.*gcc_5_.*); gcc 9 and later do' &&
        says '^still missing or not usable:' || return 1
    local option
    for option in -std=c11 -march=native -fopenmp; do
        old_compiler "case \" \$* \" in *' $option '*) echo \"error: unrecognized option '$option'\" >&2; exit 1 ;; esac"
        setup 1 CC=old_cc && says "does not compile what is needed (unrecognized .*$option.*); gcc 9" || return 1
    done
}
another_make_is_named() {
    fake make 'echo "usage: make [-BeikNnqrstWwX]" >&2; exit 2'
    setup 1 && says "^not usable: make, needed for building everything: $bin/make is not GNU make; install that one"
    local result=$?
    rm -f "$bin/make"
    return $result
}

# As a user who is not the owner of the copy.
other_user() {
    if [ "$(command id -u)" = 0 ]; then with=(setpriv --reuid 65534 --regid 65534 --clear-groups)
    else chmod -R a-w "$copy"; fi
}
this_user() { with=(); chmod -R u+w "$copy"; }
refusal() { echo "belongs to $(stat -c %U "$1"), and ada may not write there: run sudo chown -R ada"; } # the fake id says ada
a_clone_of_somebody_else() {
    other_user
    setup 1 && says '^everything is here$' && says "^make cannot build here: $copy $(refusal "$copy") $copy, or clone into " &&
        [ "$(wc -l < "$work/said")" -eq 2 ] && setup_cuda 1 &&
        says "^missing: cublasLt, .*; not fetched, because $copy $(refusal "$copy")" && not grep -q 'pip install' "$work/asked"
    local result=$?
    this_user
    return $result
}
a_build_folder_of_somebody_else() { # after sudo make
    mkdir "$copy/build"
    other_user
    if [ "$(command id -u)" = 0 ]; then chown 65534 "$copy"; else chmod u+w "$copy"; fi
    setup 1 && says "^make cannot build here: $copy/build $(refusal "$copy/build") $copy/build, or clone into "
    local result=$?
    this_user
    [ "$(command id -u)" != 0 ] || chown 0 "$copy"
    rmdir "$copy/build"
    return $result
}
# With a copy of the copy on a small disk that is full, read-only, or runs no programs.
disks_in_the_way() {
    local with=() run=(unshare -rm sh -c 'mount -t tmpfs -o size=3m none "$FAKES/disk" && cp -r "$FAKES/copy/dev" "$FAKES/disk" || exit 3
        case $0 in
            full) dd if=/dev/zero of="$FAKES/disk/rest" 2>/dev/null ;;
            readonly) mount -o remount,ro "$FAKES/disk" ;;
            noexec) mount -o remount,noexec "$FAKES/disk" ;;
        esac
        exec "$@"')
    with=("${run[@]}" full)
    SCRIPT=$disk/dev/setup.sh setup 1 && says '^everything is here$' &&
        says "^make cannot build here: the disk that holds $disk is full (0.0 GB free): free some space there, or clone" || return 1
    setup 1 TMPDIR="$disk" && says "^the disk that holds $disk is full (0.0 GB free): set TMPDIR to" &&
        [ "$(wc -l < "$work/said")" -eq 1 ] || return 1
    with=("${run[@]}" readonly)
    SCRIPT=$disk/dev/setup.sh setup 1 &&
        says "^make cannot build here: $disk is on a read-only file system: clone onto another disk$" || return 1
    with=("${run[@]}" noexec)
    setup 1 TMPDIR="$disk" && says "^programs cannot be run in $disk (is it mounted noexec?): set TMPDIR"
}
no_temporary_folder() {
    setup 1 TMPDIR=/no/such/folder && says '^there is no folder /no/such/folder: set TMPDIR' &&
        [ "$(wc -l < "$work/said")" -eq 1 ]
}

# Fakes of nvcc and of a Python whose pip notes what it is asked for and makes what find_cuda.sh looks for.
fake_cuda() {
    mkdir -p "$work/toolkit/include"
    echo '#define CUDA_VERSION 13000' > "$work/toolkit/include/cuda.h"
    fake nvcc 'echo "Cuda compilation tools, release 13.0, V13.0.88"'
    fake python 'case "$*" in
        "-m pip --version" | "-m venv "*) [ -z "${NO_PIP:-}" ] && exec python3 "$@"; exit 1 ;;
        "-m pip install "*) echo "$@" >> "$FAKES/asked"
            [ -z "${PIP_ERROR:-}" ] || { echo "ERROR: $PIP_ERROR"; exit 1; }
            while [ "$1" != --target ]; do shift; done
            mkdir -p "$2/nvidia/cu13/include" "$2/nvidia/cu13/lib"
            for header in cublasLt cudnn nvrtc nccl; do
                touch "$2/nvidia/cu13/include/$header.h" "$2/nvidia/cu13/lib/lib$header.so.13"
            done ;;
        *) exec python3 "$@" ;;
    esac'
}
setup_cuda() { setup "$@" NVCC="$bin/nvcc" CUDA_HOME="$work/toolkit" PYTHON="$bin/python"; }
the_wheels_are_fetched_once() {
    setup_cuda 0 && says 'about 1 GB' &&
        asked '-m pip install .*nvidia-cublas==13.* nvidia-cudnn-cu13==.* nvidia-cuda-nvrtc==13.0.\*' &&
        [ -e "$copy/nvidia/cu13/lib/libcudnn.so.13" ] && not test -e "$copy/nvidia.new" && setup_cuda 0 && asked_nothing
}
without_wheels_the_rest_is_set_up() {
    rm -rf "$copy/nvidia"
    setup_cuda 0 PIP_ERROR="HTTPSConnectionPool: Max retries exceeded: Temporary failure in name resolution" &&
        explains "^pip install failed: no network; .* make DEVICE=cuda does not work; the rest does$" 'ERROR: HTTPS' &&
        setup_cuda 0 PIP_ERROR="[Errno 28] No space left on device" &&
        explains "^pip install failed: a disk is full; " 'ERROR: .Errno 28'
}
no_pip_is_told() {
    setup_cuda 0 NO_PIP=1 && says 'there is no pip: install python3-pip' && not grep -q 'pip install' "$work/asked"
}
other_wheels_do_not_count() { # they are for CUDA 13
    rm -rf "$copy/nvidia"
    setup_cuda 0 && echo '#define CUDA_VERSION 12080' > "$work/toolkit/include/cuda.h" && setup_cuda 0 && says 'missing: cublasLt'
}

user 1000 ada
for_tier rest
check "with nothing missing, a plain user without sudo succeeds and apt-get is not called" nothing_missing_needs_no_rights
for_tier quick
check "a plain user whose sudo wants a password gets the command to copy where there is no terminal, and a failure" \
    a_user_without_a_terminal_gets_the_command
check "a plain user who may use sudo installs with it" a_user_with_sudo_uses_it
if command -v script > /dev/null; then
    check "a plain user whom sudo refuses gets the command for an administrator, and a failure" a_user_whom_sudo_refuses_is_told
    check "a plain user with a password installs with sudo" a_user_with_a_password_installs
else skip "a plain user in a terminal" "there is no script, which makes one"; fi
fake sudo 'exit 1'
rm -f "$work/broken/jansson.h"
check "where there is no sudo, the command uses su" without_sudo_su_is_named
check "where there is no apt, the command has that system's package names" other_systems_get_their_own_names
check "an unknown system gets Debian's names of the packages" an_unknown_system_gets_debians_names
fake_cuda
check "a clone that belongs to somebody else is named with the remedy, and fails" a_clone_of_somebody_else
check "a build folder that belongs to somebody else is named with the remedy, and fails" a_build_folder_of_somebody_else
if unshare -rm sh -c 'mount -t tmpfs -o size=3m none "$0" && mount -o remount,ro "$0"' "$disk" 2> /dev/null; then
    check "a full disk, a read-only one, and one without programs are named" disks_in_the_way
else skip "a full disk, a read-only one, and one without programs" "disks cannot be mounted here"; fi
check "a temporary folder that does not exist is named" no_temporary_folder
check "where nvcc is and NVIDIA's libraries are not, their wheels are fetched, once" the_wheels_are_fetched_once
check "wheels that cannot be fetched are not a failure: the CPU's programs need none" without_wheels_the_rest_is_set_up
check "a missing pip is reported" no_pip_is_told
check "wheels of another CUDA version than the toolkit's do not count" other_wheels_do_not_count
user 0 root
check "Chromium is installed only where it is asked for, and there is no other option" chromium_is_asked_for
check "root installs what is missing and nothing else, after one update" root_installs_what_is_missing_and_no_more
check "a full disk keeps what is required, which comes first" a_full_disk_keeps_what_is_required
check "an installation that fails shows why and fails" a_failed_installation_fails
check "no network is named, apt's own words come after it, and the rest goes on" no_network
check "packages that apt does not know are named, with the reason" no_lists
check "another program that installs packages is named" another_apt_is_running
rm -f "$work/broken/jansson.h"
fake apt-get 'echo "$@" >> "$FAKES/asked"'
check "a compiler that is too old is named with its version, and with one that works" an_old_compiler_is_named
check "a make that is not GNU make is named" another_make_is_named
check "libFuzzer's library is asked for in clang's version; it is optional, so its absence is not a failure" \
    the_fuzzers_library_is_of_clangs_version
done_testing
