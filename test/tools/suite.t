#!/bin/bash
# What test/run.sh and test/readme.sh say when something fails: the check's name and its diagnostics, at the end of a long log.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
says() { grep -qe "$1" "$work/said" || { cat "$work/said"; echo "it did not say '$1'"; return 1; }; }

# ---- run.sh, with two shell tests and a C test ----
copy=$work/copy
mkdir -p "$copy/test/runs" "$copy"/build/test "$copy"/build/{bf16,fp16}/test && cp test/run.sh "$copy/test"
echo 'echo "ok 1 - fine"; echo "# of a check that passes"; echo "not ok 2 - the bits of ddp"; echo "#   they differ"; seq 20 | sed "s/^/#   line /"; echo 1..2' \
    > "$copy/test/runs/bad.t"
echo 'echo "ok 1 - fine"; echo "# also of one that passes"; echo 1..1' > "$copy/test/runs/good.t"
printf '#!/bin/sh\necho 1..1; [ ! -e build/bad ] || { echo "not ok 1 - test_sum"; exit 1; }; echo "ok 1 - test_sum"\n' > "$copy/build/test/test_sum"
chmod +x "$copy/build/test/test_sum"
for precision in . bf16; do printf '#!/bin/sh\necho 1..1; echo "ok 1 - x"\n' > "$copy/build/$precision/test/test_layers"; chmod +x "$copy/build/$precision/test/test_layers"; done
runs() { env -u MAKEFLAGS -u MAKELEVEL sh "$copy/test/run.sh" quick > "$work/said" 2>&1; }
check "a test that fails makes the suite fail" not runs
check "  which says the check and why it failed" eval 'says "^build-t-quick-bad.t:$" && says "^  not ok 2 - the bits of ddp$" && says "^  #   they differ$"'
check "  but not all of a long log, nor what passed" eval '[ "$(grep -c "#   line" "$work/said")" = 11 ] && ! grep "that passes\|  ok" "$work/said"'
check "a C test that fails as well" eval 'touch "$copy/build/bad"; ! runs && says "^build-test-test_sum:$" && says "^  not ok 1 - test_sum$"'
check "without them all pass" eval 'rm "$copy/build/bad" "$copy/test/runs/bad.t" && runs && says "^All 6 checks passed"'

# ---- readme.sh, in a project whose commands only print ----
project=$work/project
mkdir -p "$project/test" "$project/dev" && cp test/readme.sh "$project/test" && echo 'exit 0' > "$project/dev/setup.sh"
sed -n '/^    .*make \(demo\|test\)\|^    export OMPI\|^    make train_gpt2_zero &&\|^    mpirun --overs/p' README.md > "$project/README.md"
printf '#!/bin/sh\necho "step 20/20 | val loss 1"\n' > "$project/mpirun" && chmod +x "$project/mpirun"
cat > "$project/Makefile" << 'END'
demo:
	@echo "validation loss: 5.0 first, 1.5 at the end"
train_gpt2_zero:
.PHONY: demo test train_gpt2_zero
test:
	@cat log && ! grep -q '^not ok' log
END
printf 'cc a.c\n%s\n' 'All 7 checks passed: here.' > "$project/log"
reads() { # commits the project's state, and runs it
    (cd "$project" && { [ -d .git ] || git init -q; } && git add . && git -c user.name=n -c user.email=n@example.org commit -q -m state) &&
        env -u MAKEFLAGS -u MAKELEVEL PATH="$project:$PATH" bash "$project/test/readme.sh" > "$work/said" 2>&1
}
chmod 755 "$work" # a plain user also runs them
check "README's commands work where they do" eval 'reads && says "^README.md.s commands work" && says "^ok .* make test$" && says "user:   it trains 20 steps$"'
check "  make test as a plain user" eval '[ "$(grep -c "^ok .* make test$" "$work/said")" = 1 ] && { [ "$(id -u)" != 0 ] || says "plain user: .*make test$"; }'
{ seq -f 'ok %g - before' 200; echo "not ok 201 - the bits of zero"; seq -f '#   why %g' 20; seq -f 'ok %g - after' 202 300; echo "Test Summary Report"
    echo "-----"; echo "build/t/quick-zero.t (Wstat: 0 Tests: 84 Failed: 1)"; echo "Result: FAIL"; seq -f 'cc %g.c' 100; } > "$project/log"
check "a failing make test: readme.sh fails" not reads
check "  its report names the check, with why it failed" eval 'says "^#   not ok 201 - the bits of zero$" && says "^#   #   why 1$" && says "Wstat: 0 Tests: 84 Failed: 1"'
check "  before the end of the log, and not all of it" eval '! grep "why 13\|before\|cc 61.c" "$work/said" && says "^#   cc 62.c$" && says "^#   cc 100.c$" &&
    [ "$(grep -n "bits of zero" "$work/said" | head -n 1 | cut -d: -f 1)" -lt "$(grep -n "cc 62.c" "$work/said" | head -n 1 | cut -d: -f 1)" ]'
done_testing
