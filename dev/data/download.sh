# download.sh - functions that the download scripts share. Sourced; POSIX sh; needs curl or wget.
#
# A download goes to FILE.part and gets its name only when it is complete and checked. A script that was stopped can be
# started again: it continues the download, and does not fetch complete files twice.

fail() { echo "error: $*" >&2; exit 1; }

bytes_of() { wc -c < "$1" | tr -d ' '; }
# int32_of FILE INDEX: prints the file's INDEX-th little-endian int32 in decimal; nothing if the file ends before.
int32_of() { od -An -t d4 -j $((4 * $2)) -N 4 "$1" | tr -d ' '; }
sha256_of() { if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1; }

# fetch URL FILE: downloads all of it; if FILE exists, only what is missing at its end.
fetch() {
    if command -v curl >/dev/null; then curl -fL --retry 3 --connect-timeout 20 --progress-bar -C - -o "$2" "$1"
    elif command -v wget >/dev/null; then wget -q --tries=3 --timeout=20 -c -O "$2" "$1"
    else fail "curl or wget is needed to download"
    fi
}

# download URL FILE CHECK...: fetches FILE unless it is there. `CHECK... FILE.part` must then succeed, or say what is wrong.
download() {
    url=$1 file=$2
    shift 2
    if [ -e "$file" ]; then
        echo "$file exists already"
        return
    fi
    mkdir -p "$(dirname "$file")"
    echo "$file from $url"
    part=$file.part
    [ -s "$part" ] && resumed=yes || resumed=no
    status=0
    fetch "$url" "$part" || status=$?
    case $resumed:$status in
        yes:22 | yes:33 | yes:36 | yes:8) # the server cannot resume in the middle, or the file was complete
            rm -f "$part"
            status=0
            fetch "$url" "$part" || status=$?
            ;;
    esac
    [ $status -eq 0 ] || fail "cannot download $url; is there a network? $part keeps what has arrived; run this again to continue"
    if ! problem=$("$@" "$part"); then
        rm -f "$part"
        fail "what came from $url is not what it should be: $problem"
    fi
    mv "$part" "$file"
}

# ---- checks ----

# is_exactly BYTES SHA256 FILE
is_exactly() {
    [ "$(bytes_of "$3")" -eq "$1" ] || { echo "it has $(bytes_of "$3") bytes, not $1"; return 1; }
    [ "$(sha256_of "$3")" = "$2" ] || { echo "its SHA-256 is $(sha256_of "$3"), not $2"; return 1; }
}

# is_token_file FILE: it has llm.c's header, and the size that the header says.
is_token_file() {
    [ "$(int32_of "$1" 0)" = 20240520 ] && [ "$(int32_of "$1" 1)" = 1 ] || { echo "it is not a token file"; return 1; }
    [ "$(bytes_of "$1")" -eq $((1024 + 2 * $(int32_of "$1" 2))) ] ||
        { echo "its header says $(int32_of "$1" 2) tokens, but it has $(bytes_of "$1") bytes"; return 1; }
}

# mentions WORD FILE
mentions() { grep -q "$1" "$2" || { echo "it does not mention $1"; return 1; }; }
