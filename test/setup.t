#!/bin/bash
# dev/setup.sh asks for the right packages, only for what is missing, and only where it may: with a fake apt, sudo and id,
# so nothing is installed. A header that does not compile stands for a library that is missing.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
absent=$(sh dev/doctor.sh < /dev/null | sed '/several ranks/,$d' | grep -im 1 missing)
[ -z "$absent" ] || { echo "1..0 # SKIP only where all is installed:$absent"; exit 0; }
export FAKES=$work
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
    env PATH="${TOOLS:-$bin:$PATH}" CPATH="$work/broken" CI=true "$@" /bin/sh dev/setup.sh > "$work/said" 2>&1 < /dev/null
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

user 1000
check "with nothing missing, a plain user without sudo succeeds and apt-get is not called" nothing_missing_needs_no_rights
check "a plain user who may not use sudo gets the command to copy, and a failure" a_user_without_sudo_gets_the_command
check "a plain user who may use sudo installs with it" a_user_with_sudo_uses_it
user 0
check "root installs what is missing and nothing else, after one update" root_installs_what_is_missing_and_no_more
check "an installation that fails shows why and fails" a_failed_installation_fails
rm -f "$work/broken/jansson.h"
fake apt-get 'echo "$@" >> "$FAKES/asked"'
check "libFuzzer's library is asked for in clang's version; it is optional, so its absence is no failure" the_fuzzers_library_is_of_clangs_version
check "where there is no apt, the command has that system's package names" other_systems_get_their_own_names
done_testing
