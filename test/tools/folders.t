#!/bin/bash
# Headers in llmc/ neither include nor use one another in circles, and arrows between its folders point downward (make
# check-folders); and that check finds what it is meant to find.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }

check "llmc/ can be read from its bottom to its top" perl test/circles.pl

# tree: makes a small llmc/ without faults in $work/llmc. put FILE: writes a header of it from stdin.
put() { mkdir -p "$(dirname "$work/llmc/$1")"; cat > "$work/llmc/$1"; }
tree() {
    rm -rf "$work/llmc"
    put base/common.h <<'END'
#ifndef LLMC_COMMON_H
#define LLMC_COMMON_H
#define HALF(x) ((x) / 2)
typedef enum { SMALL, LARGE } Size;
static inline int square(int x) { return x * x; }
#endif
END
    put device/device.h <<'END'
#include "../base/common.h"
typedef struct Device { int threads; Size size; } Device;
int device_threads(Device* d); // implemented in cpu/ and cuda/
END
    put device/cpu/device.h <<'END'
#include "../device.h"
static int cpu_default = 4;
static int most(int a, int b) { return a > b ? a : b; }
int device_threads(Device* d) { return most(d->threads, cpu_default); }
END
    put device/cuda/device.cuh <<'END'
#include "../device.h"
template <typename T>
__device__ inline T most(T a, T b = T(0)) { return a > b ? a : b; }
__global__ void __launch_bounds__(256) count_kernel(int* n) { *n = most(*n, 1); }
int device_threads(Device* d) { return HALF(d->threads); }
END
    put model/gpt2.h <<'END'
#include "../base/common.h"
typedef struct { int layers; } Config;
#define MOST_LAYERS 48
END
    put comm/ring.h <<'END'
typedef int Add(int a, int b);
static int ring_pass(int n, Add* add) { return add(n, device_threads(0)); }
END
    put comm/comm.h <<'END'
#include "../device/device.h"
#include "ring.h"
static int plus(int a, int b) { return a + b; }
static inline int comm_sum(int n) { return ring_pass(n, plus); } // ring_pass is in ring.h, and knows nothing of this file
END
    put data/loader.h <<'END'
#include "../device/device.h"
static inline int loader_next(Device* d) { return square(d->threads); }
END
    put run/report.h <<'END'
#include "../model/gpt2.h"
static inline int report(Config c) { return c.layers < MOST_LAYERS ? comm_sum(c.layers) : loader_next(0); }
END
}
# tree_with [FILE TEXT]...: the small llmc/, with more text at the end of these headers.
tree_with() {
    tree
    while [ $# -gt 0 ]; do
        mkdir -p "$(dirname "$work/llmc/$1")"
        printf '%s\n' "$2" >> "$work/llmc/$1"
        shift 2
    done
}
passes() { tree_with "$@" && perl test/circles.pl "$work/llmc"; }
# finds FAULT... -- [FILE TEXT]...: the check of this tree fails with these lines, in any order, and with no other.
finds() {
    local faults=() fault
    while [ "$1" != -- ]; do faults+=("$1"); shift; done
    shift
    tree_with "$@"
    ! perl test/circles.pl "$work/llmc" > "$work/said" 2>&1 || { echo "nothing was noticed"; return 1; }
    cat "$work/said"
    [ "$(grep -vc '^[0-9]* headers in ' "$work/said")" -eq ${#faults[@]} ] || { echo "${#faults[@]} lines were expected"; return 1; }
    for fault in "${faults[@]}"; do grep -Fqx -e "$fault" "$work/said" || { echo "there is no '$fault'"; return 1; }; done
}

check "a tree without faults passes" passes

# ---- circles of includes ----
check "two headers that include each other" finds 'include circle: base/common.h -> base/rng.h -> base/common.h' -- \
    base/common.h '#include "rng.h"' base/rng.h '#include "common.h"'
check "three in a circle" finds 'include circle: save/a.h -> save/b.h -> save/c.h -> save/a.h' -- \
    save/a.h '#include "b.h"' save/b.h '#include "./c.h"' save/c.h '#  include "../save/a.h"'
check "two circles with an arrow in common: the shorter one" finds 'include circle: save/a.h -> save/b.h -> save/a.h' -- \
    save/a.h '#include "b.h"' save/b.h '#include "c.h"
#include "a.h"' save/c.h '#include "a.h"'
check "a header that includes itself" finds 'include circle: base/common.h -> base/common.h' -- base/common.h '#include "common.h"'
check "a header that is not there" finds 'no such file: base/common.h includes base/rng.h' -- base/common.h '#include "rng.h"'
check "an include in a comment is none" passes base/rng.h '#include "common.h"' base/common.h '// #include "rng.h"
/*
#include "rng.h"
*/'

# ---- circles of use: comm.h uses ring_pass ----
# circle SYMBOL RING [COMM]: it is found when ring.h also has the text RING, which uses SYMBOL of comm.h, to which COMM is added.
circle() { finds "use circle: comm/comm.h -> comm/ring.h (ring_pass) -> comm/comm.h ($1)" -- comm/ring.h "$2" comm/comm.h "${3-}"; }
check "two headers that use each other: a function" circle comm_sum 'static int ring_all(void) { return comm_sum(1); }'
check "  its name alone" circle comm_sum 'static int (*const ring_sums[])(int) = { comm_sum };'
check "  in a macro" circle comm_sum '#define RING_SUM(n) \
    comm_sum(n)'
check "  a function over several lines" circle comm_long 'static int ring_long(void) { return comm_long(1, 2); }' 'static inline int comm_long(int a,
                            int b) {
    return a + b;
}'
check "  a macro" circle COMM_MOST 'static int ring_most[COMM_MOST];' '#define COMM_MOST 8'
check "  a condition on a macro" circle COMM_MOST '#if COMM_MOST > 4
#endif' '#define COMM_MOST 8'
check "  a type" circle Comm 'static void ring_init(Comm* c) { c->rank = 0; }' 'typedef struct { int rank; } Comm;'
check "  a type of functions" circle CommAdd 'static CommAdd ring_add;' 'typedef int (*CommAdd)(int, int);'
check "  a struct" circle Link 'static void ring_link(struct Link* l) { l->to = 0; }' 'struct Link { int to; };'
check "  a constant" circle COMM_RING 'static int ring_kind(void) { return COMM_RING; }' 'enum { COMM_TREE, COMM_RING = 4, };'
check "  a variable" circle comm_count 'static int ring_count(void) { return comm_count; }' 'static int comm_rank = 0, comm_count = 1;'
check "  several" circle "COMM_MOST, comm_sum" 'static int ring_some(void) { return comm_sum(COMM_MOST); }' '#define COMM_MOST 8'
check "three that use one another" finds 'use circle: save/a.h -> save/b.h (b_f) -> save/c.h (c_f) -> save/a.h (a_f)' -- \
    save/a.h 'static int a_f(void) { return b_f(); }' save/b.h 'static int b_f(void) { return c_f(); }' save/c.h 'static int c_f(void) { return a_f(); }'
check "a word in a comment or in a string is no use" passes comm/ring.h 'static const char* ring_name = "comm_sum(1)"; // like comm_sum(1)'
check "  nor is a member of that name" passes comm/ring.h 'static int ring_at(Ring* r) { return r->comm_sum(1) + r->next.comm_sum(2); }'
check "  nor a local variable" passes comm/ring.h 'static int ring_local(void) { int *comm_count = 0; return 1; }' comm/comm.h 'static int comm_count;'
check "  nor a function that is announced where it is used" passes comm/ring.h 'static inline int comm_sum(int n);
static int ring_all(void) { return comm_sum(1); }'
check "  nor a macro that is gone at the end" passes comm/comm.h '#define TWICE 2
#undef TWICE' comm/ring.h '#define TWICE 2
static int ring_two = TWICE;
#undef TWICE'
check "  nor a question for another header's guard" passes base/common.h 'static int common_x = X;' base/x.h '#define X 1
#ifdef LLMC_COMMON_H
#endif'
check "of two functions of one name, the one in the same folder is meant" passes data/a.h 'static int help(void) { return 1; }' \
    data/b.h 'static int b_help(void) { return help(); }' run/a.h 'static int help(void) { return 2; }'

# ---- arrows ----
check "an arrow upward: an include" finds 'upward arrow: device/device.h -> save/a.h (only included)' -- \
    device/device.h '#include "../save/a.h"' save/a.h 'static int a_f(void) { return 1; }'
check "  a use, whoever includes what" finds 'upward arrow: base/common.h -> save/a.h (a_f)' -- \
    base/common.h 'static int common_a(void) { return a_f(); }' save/a.h 'static int a_f(void) { return 1; }'
check "  a use of what another header already uses" finds 'upward arrow: device/cpu/device.h -> data/loader.h (loader_next)' -- \
    device/cpu/device.h 'static int cpu_next(Device* d) { return loader_next(d); }'
check "  no more than six symbols are named" finds 'upward arrow: base/common.h -> save/a.h (A, B, C, D, E, F, ... 7 in all)' -- \
    base/common.h 'enum { ALL = A + B + C + D + E + F + G };' save/a.h 'enum { A, B, C, D, E, F, G };'
check "model does not use device" finds 'upward arrow: model/gpt2.h -> device/device.h (device_threads)' -- \
    model/gpt2.h 'static int gpt2_threads(void) { return device_threads(0); }'
check "  nor device model" finds 'upward arrow: device/device.h -> model/gpt2.h (MOST_LAYERS)' -- device/device.h 'static int device_most = MOST_LAYERS;'
check "data does not use comm" finds 'upward arrow: data/loader.h -> comm/comm.h (comm_sum)' -- data/loader.h 'static int loader_sum(void) { return comm_sum(1); }'
check "  nor comm data" finds 'upward arrow: comm/comm.h -> data/loader.h (loader_next)' -- comm/comm.h 'static int comm_next(void) { return loader_next(0); }'
order="base watch comm save parallel run"
chain() { # each folder uses the one before it
    local text=() before=base folder
    for folder in $order; do
        [ $folder = base ] && text+=("base/x.h" "static int base_x(void) { return 1; }") ||
            text+=("$folder/x.h" "#include \"../$before/x.h\"
static int ${folder}_x(void) { return ${before}_x(); }")
        before=$folder
    done
    passes "${text[@]}"
}
check "each folder may use the one before it" chain
upward() { # and none the one after it
    local before=base folder
    for folder in ${order#base }; do
        finds "upward arrow: $before/x.h -> $folder/x.h (X)" -- $before/x.h "static int ${before}_x = X;" $folder/x.h '#define X 1' || return 1
        before=$folder
    done
}
check "  and none the one after it" upward
check "a folder that is not in the order is an error" finds 'no folder of the order: misc/x.h' -- misc/x.h '#define X 1'
check "  as is a header outside of all folders" finds 'no folder of the order: x.h' -- x.h '#define X 1'
check "  and a tree without headers" eval 'mkdir "$work/empty" && ! perl test/circles.pl "$work/empty"'
done_testing
