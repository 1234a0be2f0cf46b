#!/bin/sh
# setup.sh - installs what is missing here and nothing else: by apt on Debian and Ubuntu, and elsewhere it prints the
# command to copy. What is missing is found by building and running small programs (dev/doctor/probes.sh), so whatever
# was installed in another way counts too, and a machine that has everything needs no rights and no network.
#
#   sh dev/setup.sh
#
# Exit status: 0 if everything required is here at the end, 1 if not.
set -u
here=$(dirname -- "$0")
probes=$here/doctor
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
. "$probes/probes.sh"

# Fills $scratch/missing with the table's lines for what is not here, and sets required_missing to their names.
look() {
    : >"$scratch/missing"
    components | grep -v '|extra|' >"$scratch/wanted"
    required_missing=
    while IFS='|' read -r key name class rest; do
        "probe_$key" >/dev/null 2>&1 </dev/null && continue
        echo "$key|$name|$class|$rest" >>"$scratch/missing"
        if [ "$class" = required ]; then required_missing="${required_missing:+$required_missing, }$name"; fi
    done <"$scratch/wanted"
}

say_missing() {
    while IFS='|' read -r key name class purpose rest; do
        if [ "$class" = required ]; then echo "missing: $name, needed for $purpose"
        else echo "missing: $name (optional); without it there is no: $purpose"; fi
    done <"$scratch/missing"
}

# packages COLUMN: the packages that one package manager has for what is missing, each once, on one line.
packages() { cut -d '|' -f "$1" "$scratch/missing" | tr -s ' ' '\n' | awk '!seen[$0]++' | paste -s -d ' ' -; }

# libFuzzer's run-time library must be of clang's own version; the package that has it is named differently from release
# to release. apt's Depends of clang tells the version where clang is not installed yet.
fuzzer_runtime() {
    if has "${CLANG:-clang}"; then version=$("${CLANG:-clang}" -dumpversion | cut -d . -f 1)
    else version=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p' | head -n 1); fi
    for package in "libclang-rt-$version-dev" "libclang-common-$version-dev"; do
        if has_candidate "$package"; then echo "$package"; return; fi
    done
    echo libclang-rt-dev
}
has_candidate() { LC_ALL=C apt-cache policy "$1" 2>/dev/null | grep -q '^ *Candidate: [^(]'; }

# Everything that apt must install.
apt_packages() {
    for package in $(packages 5); do
        if [ "$package" = libclang-rt-dev ]; then fuzzer_runtime; else echo "$package"; fi
    done | paste -s -d ' ' -
}

give_up() { # the command to copy...
    echo
    echo "To install it:"
    echo "    $*"
    [ -z "$required_missing" ] && { echo "What is missing is optional; the rest works without it."; exit 0; }
    exit 1
}

install_with_apt() {
    if [ "$(id -u)" = 0 ]; then as_root=
    elif has sudo && sudo -n true 2>/dev/null; then as_root="sudo -n"
    elif has sudo && [ -t 0 ]; then as_root=sudo # it asks for the password
    else give_up "su -c 'apt-get update && apt-get install -y --no-install-recommends $(apt_packages)'"; fi
    echo "fetching the package lists ..."
    $as_root apt-get update -q >"$scratch/log" 2>&1 || { tail -n 5 "$scratch/log"; echo "apt-get update failed; going on with the lists that are here" >&2; }
    chosen=
    for package in $(apt_packages); do
        if has_candidate "$package"; then chosen="$chosen $package"; else echo "this release has no package $package" >&2; fi
    done
    [ -n "$chosen" ] || return
    echo "installing:$chosen"
    # shellcheck disable=SC2086 # lists of words
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $chosen </dev/null >"$scratch/log" 2>&1 ||
        { tail -n 15 "$scratch/log"; echo "apt-get install failed: see above" >&2; }
}

look
if [ ! -s "$scratch/missing" ]; then echo "everything is here"; exit 0; fi
say_missing
if has apt-get; then install_with_apt
elif has dnf; then give_up "sudo dnf install $(packages 6)"
elif has pacman; then give_up "sudo pacman -S --needed $(packages 7)"
elif has brew; then give_up "brew install $(packages 8)"
else give_up "(no apt, dnf, pacman or brew here; Debian's names are) $(packages 5)"; fi

look
if [ ! -s "$scratch/missing" ]; then echo "everything is here now"; exit 0; fi
echo "still missing after the installation:"
say_missing
[ -z "$required_missing" ]
