#!/bin/bash
# dev/doc_outputs.pl finds quotes that programs no longer print, in the documents of a small made-up project.
. test/lib.sh
command -v git > /dev/null || { echo "1..0 # SKIP git is missing"; exit 0; }
tool=$PWD/dev/doc_outputs.pl

mkdir "$work/project"
cd "$work/project" || exit 1
printf 'all tools:\n' > Makefile
cat > train <<'END'
for step in 1 2 10; do echo "step $step/10 | loss $(echo 5 $step | awk '{ print $1 / $2 }') | grad norm inf | $RANDOM tok/s"; done
echo "error: rank 2 has died  [ranks.h:7]" >&2
printf 'sample after step 10:\nThe end. 1 2\nThe very end.\nsaved step 10\n'
END
cat > doc.md <<'END'
Some text, and what to type:

    make everything

A run, its command in two lines:

    $ for i in 1; do
    > bash train; done; mkdir runs
    step 2/10 | loss 2.5 | grad norm inf | ...
    ...
    step 10/10 | loss 0.4 | grad norm 7.25 | ...
    error: rank 2 has died  [ranks.h:7]

What the first command made is there for the second:

    $ ls -d runs
    runs

And at the end of the first

    sample after step 10:
    No end.
    1.
    saved step 10
END
git init -q . && git add . && git -c user.name=Test -c user.email=test@example.org commit -q -m test || exit 1

run() { perl "$tool" "$@" doc.md > ../said 2>&1; local status=$?; cat ../said; return $status; }
check "a document that quotes other numbers is not an error" run
check "  the new numbers are shown below the quote" grep -Fxq '    + step 10/10 | loss 0.5 | grad norm inf | ...' ../said
check "  and only changed lines are counted" grep -q "5 quoted lines are the same, 3 have other numbers, 0 are gone" ../said
check "  what a model wrote is quoted line by line" grep -Fxq '    + The very end.' ../said
check "  a block that no command printed is listed as left out" grep -q "not compared.* 3$" ../said
check "--write" run --write
check "  puts the new lines into the document" run
check "  which then quotes what is printed" grep -q "8 quoted lines are the same, 0 have other numbers, 0 are gone" ../said
git diff --numstat > ../changed
check "  and changes nothing else" grep -Fxq "3	3	doc.md" ../changed
sed -i 's/rank 2 has died/rank 2 has left/; s|step 2/10|step 3/10|' doc.md
check "words that are no longer printed are an error" not run
check "  which names the line" grep -q "line 12 is no longer printed" ../said
check "  and shows the printed line that begins like it" grep -Fxq "    ? error: rank 2 has died  [ranks.h:7]" ../said
check "  a line of another step does not match" grep -q "line 9 is no longer printed" ../said
printf 'all tools:\n\t@echo no >&2; false\n' > Makefile
git -c user.name=Test -c user.email=test@example.org commit -q -a -m test
check "programs that cannot be built are an error" not run
check "  that says so" grep -q "cannot be built" ../said
cd / && done_testing
