# options.sh - takes a script's own options out of those that it passes on to programs. Sourced; the script has usage()
# and fail().

# take_options "--NAME..." ARGUMENT...: for each --NAME VALUE among the arguments, the variable NAME is VALUE (batch_size for
# --batch-size). $others are all other arguments, quoted: eval "set -- $others" makes them the script's own.
take_options() {
    own=$1 others=
    shift
    while [ $# -gt 0 ]; do
        case $1 in -h|--help) usage 0 ;; esac
        case " $own " in
            *" $1 "*)
                [ $# -ge 2 ] || fail "$1 wants a value"
                eval "$(echo "${1#--}" | tr - _)=\$2"
                shift 2 ;;
            *)
                others="$others '$(printf '%s\n' "$1" | sed "s/'/'\\\\''/g")'"
                shift ;;
        esac
    done
}
