#!/bin/bash
# Stages differ only where they must (make check-stages), and that check can fail.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }

# finds PATTERN FILE SED-SCRIPT: after this edit of a copy of the first two stages or of their list, the check fails with PATTERN.
finds() {
    rm -rf "$work/stages"
    mkdir "$work/stages"
    cp train_gpt2_single.cu train_gpt2_ddp.cu "$work/stages"
    grep '^ddp ' test/stages.list > "$work/stages/stages.list"
    sed "$3" "$work/stages/$2" > "$work/edited"
    ! cmp -s "$work/edited" "$work/stages/$2" || { echo "the edit changes nothing"; return 1; }
    mv "$work/edited" "$work/stages/$2"
    ! perl test/check_stages.pl "$work/stages/stages.list" "$work/stages" > "$work/said" || { echo "it was not noticed"; return 1; }
    cat "$work/said"
    grep -q "$1" "$work/said" && [ "$(grep -vc -e '->' "$work/said")" -eq 1 ] # that, and nothing else
}
ddp=train_gpt2_ddp.cu
check "stages are the same except where test/stages.list gives a reason" perl test/check_stages.pl
check "a changed line in a shared function is found" finds "$ddp: block_forward differs" $ddp '/^static void block_forward/,/^}/s/BT, 4\*C, C/BT, C, 4*C/'
check "  in a function of one line" finds "$ddp: is_due differs" $ddp '/^static bool is_due/s/every > 0/every > 1/'
check "a changed comment above it is found" finds "$ddp: unit_params differs" $ddp "s|^// Returns unit u's parameters, ready for use.|// Unit u's parameters.|"
check "  and a blank at the end of a line" finds "$ddp: gpt2_update differs" $ddp '/^static void gpt2_update/s/$/ /'
check "a changed struct" finds "$ddp: BlockParams differs" $ddp 's/floatX \*ln1w, \*ln1b, \*qkvb/floatX *ln1b, *ln1w, *qkvb/'
check "a macro" finds "$ddp: STAGED differs" $ddp 's/^#define STAGED.*/#define STAGED ((size_t)1 << 16)/'
check "a function that is missing" finds "$ddp: head_forward is missing" $ddp '/^\/\/ Computes g->losses. The/,/^}/d'
check "a section's heading" finds "$ddp: section 6. the optimizer is missing" $ddp 's|^// 6. the optimizer|// 6. optimizer|'
check "a function that moved" finds "keep the order" $ddp "/^\/\/ Returns the memory that unit u's gradients/,/^}/{H;d
}
/^\/\/ 6. the optimizer/{G
}"
check "a reason that is not needed" finds "step_log is the same.* though" train_gpt2_ddp.cu '/comm_bytes = \|comm_exposed_ms = /d'
check "a reason for a function that does not exist" finds "no_such_function is not in" stages.list '$a\
ddp no_such_function it was renamed'
echo "ddp block_forward" > "$work/list"
unexplained() { perl test/check_stages.pl "$work/list" 2>&1 | grep "expected STAGE NAME REASON"; }
check "a line of the list without a reason is an error" unexplained
done_testing
