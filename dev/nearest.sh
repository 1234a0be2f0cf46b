#!/bin/sh
# nearest.sh WORD CANDIDATE... - prints the candidate that WORD was most likely meant to be: the one with the fewest letters to change,
# insert, remove or swap with a neighbour. Prints nothing if those are more than a third of the letters.
word=$1
shift
printf '%s\n' "$@" | awk -v word="$word" '
    function min(a, b) { return a < b ? a : b }
    function distance(a, b,    i, j, n, m, cost, d) {
        n = length(a); m = length(b)
        for (i = 0; i <= n; i++) d[i, 0] = i
        for (j = 0; j <= m; j++) d[0, j] = j
        for (i = 1; i <= n; i++) for (j = 1; j <= m; j++) {
            cost = substr(a, i, 1) != substr(b, j, 1)
            d[i, j] = min(d[i - 1, j - 1] + cost, min(d[i - 1, j], d[i, j - 1]) + 1)
            if (i > 1 && j > 1 && substr(a, i, 1) == substr(b, j - 1, 1) && substr(a, i - 1, 1) == substr(b, j, 1))
                d[i, j] = min(d[i, j], d[i - 2, j - 2] + 1)
        }
        return d[n, m]
    }
    BEGIN { least = int(length(word) / 3) + 1 }
    { d = distance(word, $0); if (d < least) { least = d; nearest = $0 } }
    END { if (nearest != "") print nearest }'
