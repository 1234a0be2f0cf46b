# median.awk - the median, for this folder's tables, which collect value[key, i] with i from 1 to count[key].

function sorted_copy(key, sorted,   n, i, j, x) {
    n = count[key]
    for (i = 1; i <= n; i++) {
        x = value[key, i]
        for (j = i - 1; j > 0 && sorted[j] > x; j--) sorted[j + 1] = sorted[j]
        sorted[j + 1] = x
    }
    return n
}
function median(key,   n, sorted) {
    n = sorted_copy(key, sorted)
    return n == 0 ? 0 : n % 2 ? sorted[(n + 1) / 2] : (sorted[n / 2] + sorted[n / 2 + 1]) / 2
}
