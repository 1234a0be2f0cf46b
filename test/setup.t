#!/bin/bash
# dev/setup.sh asks for the right packages, only for what is missing, and only where it may: with a fake apt, sudo and id,
# so nothing is installed. A header that does not compile stands for a library that is missing.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
absent=$(sh dev/doctor.sh < /dev/null | sed '/several ranks/,$d' | grep -im 1 missing)
[ -z "$absent" ] || { echo "1..0 # SKIP only where all is installed:$absent"; exit 0; }
export FAKES=$work NVCC=no-such-nvcc
bin=$work/bin
mkdir "$bin" "$work/broken"

fake() { printf '#!/bin/sh\n%s\n' "$2" > "$bin/$1"; chmod +x "$bin/$1"; }
# apt-get notes what it is asked for; installing makes Jansson whole.
fake apt-get 'echo "$@" >> "$FAKES/asked"; case "$1" in install) rm -f "$FAKES/broken/jansson.h" ;; esac'
fake apt-cache 'case "$1" in policy) echo "  Candidate: 1.0" ;; depends) echo "  Depends: clang-77" ;; esac'
fake sudo 'exit 1'
user() { fake id "echo $1"; }
break_jansson() { echo '#error not here' > "$work/broken/jansson.h"; }

# setup STATUS [VARIABLE=VALUE...]: runs it with the fakes first on the PATH; what it says goes to $work/said.
setup() {
    local expected=$1 status
    shift
    rm -f "$work/asked"
    touch "$work/asked"
    env PATH="${TOOLS:-$bin:$PATH}" CPATH="$work/broken" CI=true "$@" /bin/sh "${SCRIPT:-dev/setup.sh}" > "$work/said" 2>&1 < /dev/null
    status=$?
    cat "$work/said" "$work/asked"
    [ "$status" -eq "$expected" ]
}
says() { grep -qe "$1" "$work/said" || { echo "it did not say '$1'"; return 1; }; }
asked() { grep -qxe "$1" "$work/asked" || { echo "apt-get was not asked '$1'"; return 1; }; }
asked_nothing() { [ ! -s "$work/asked" ]; }

nothing_missing_needs_no_rights() { setup 0 && says '^everything is here$' && asked_nothing; }
root_installs_what_is_missing_and_no_more() {
    break_jansson
    setup 0 && says 'missing: Jansson' && says 'everything is here now' && asked 'update -q' &&
        asked 'install -y -q --no-install-recommends libjansson-dev' && [ "$(wc -l < "$work/asked")" -eq 2 ]
}
a_failed_installation_fails() {
    break_jansson
    fake apt-get 'echo "$@" >> "$FAKES/asked"; echo "E: no network" >&2; exit 100'
    setup 1 && says 'E: no network' && says 'still missing'
}
a_user_without_sudo_gets_the_command() {
    break_jansson
    setup 1 && says 'apt-get install -y --no-install-recommends libjansson-dev' && asked_nothing
}
a_user_with_sudo_uses_it() {
    break_jansson
    fake sudo 'shift; exec "$@"'
    setup 0 && asked 'install -y -q --no-install-recommends libjansson-dev'
}
the_fuzzers_library_is_of_clangs_version() { setup 0 CLANG=no-such-clang && asked 'install .* clang libclang-rt-77-dev'; }
other_systems_get_their_own_names() {
    # a PATH with dnf and without apt-get; no compiler either, so everything is missing
    local tools=$work/tools tool
    mkdir "$tools"
    for tool in awk cat cut dirname env grep head mktemp paste rm sed sh tail timeout tr; do ln -s "$(command -v "$tool")" "$tools/$tool"; done
    printf '#!/bin/sh\n' > "$tools/dnf"
    chmod +x "$tools/dnf"
    TOOLS=$tools setup 1 CC=no-such-cc && says 'sudo dnf install gcc make .*onednn-devel jansson-devel pcre2-devel' && asked_nothing
}

# A copy of the scripts, so that nvidia/ is not this folder's; fakes of nvcc and of a Python whose pip notes what it is asked
# for and makes what find_cuda.sh looks for.
fake_cuda() {
    mkdir -p "$work/copy/dev" "$work/toolkit/include"
    cp -r dev/*.sh dev/doctor "$work/copy/dev"
    echo '#define CUDA_VERSION 13000' > "$work/toolkit/include/cuda.h"
    fake nvcc 'echo "Cuda compilation tools, release 13.0, V13.0.88"'
    fake python 'case "$*" in
        "-m pip --version" | "-m venv "*) [ -z "${NO_PIP:-}" ] && exec python3 "$@"; exit 1 ;;
        "-m pip install "*) echo "$@" >> "$FAKES/asked"
            [ -z "${NO_NETWORK:-}" ] || { echo "ERROR: no network"; exit 1; }
            while [ "$1" != --target ]; do shift; done
            mkdir -p "$2/nvidia/cu13/include" "$2/nvidia/cu13/lib"
            for header in cublasLt cudnn nvrtc nccl; do
                touch "$2/nvidia/cu13/include/$header.h" "$2/nvidia/cu13/lib/lib$header.so.13"
            done ;;
        *) exec python3 "$@" ;;
    esac'
}
setup_copy() { SCRIPT=$work/copy/dev/setup.sh setup "$@" NVCC="$bin/nvcc" CUDA_HOME="$work/toolkit" PYTHON="$bin/python"; }
the_wheels_are_fetched_once() {
    setup_copy 0 && says 'about 1 GB' && asked '-m pip install .*nvidia-cublas==13.* nvidia-cudnn-cu13==.* nvidia-cuda-nvrtc==13.0.\*' &&
        [ -e "$work/copy/nvidia/cu13/lib/libcudnn.so.13" ] && not test -e "$work/copy/nvidia.new" && setup_copy 0 && asked_nothing
}
without_wheels_the_rest_is_set_up() { rm -rf "$work/copy/nvidia"; setup_copy 0 NO_NETWORK=1 && says 'no network' && says 'could not be fetched'; }
no_pip_is_told() { setup_copy 0 NO_PIP=1 && says 'there is no pip: install python3-pip' && not grep -q 'pip install' "$work/asked"; }
other_wheels_do_not_count() { # they are for CUDA 13
    rm -rf "$work/copy/nvidia"
    setup_copy 0 && echo '#define CUDA_VERSION 12080' > "$work/toolkit/include/cuda.h" && setup_copy 0 && says 'missing: cublasLt'
}

user 1000
check "with nothing missing, a plain user without sudo succeeds and apt-get is not called" nothing_missing_needs_no_rights
check "a plain user who may not use sudo gets the command to copy, and a failure" a_user_without_sudo_gets_the_command
check "a plain user who may use sudo installs with it" a_user_with_sudo_uses_it
fake_cuda
check "where nvcc is and NVIDIA's libraries are not, their wheels are fetched, once" the_wheels_are_fetched_once
check "wheels that cannot be fetched are no failure: the CPU's programs need none" without_wheels_the_rest_is_set_up
check "no pip is told" no_pip_is_told
check "wheels of another CUDA version than the toolkit's do not count" other_wheels_do_not_count
user 0
check "root installs what is missing and nothing else, after one update" root_installs_what_is_missing_and_no_more
check "an installation that fails shows why and fails" a_failed_installation_fails
rm -f "$work/broken/jansson.h"
fake apt-get 'echo "$@" >> "$FAKES/asked"'
check "libFuzzer's library is asked for in clang's version; it is optional, so its absence is no failure" the_fuzzers_library_is_of_clangs_version
check "where there is no apt, the command has that system's package names" other_systems_get_their_own_names
done_testing
