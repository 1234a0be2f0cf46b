# Read by experiments/report.pl.
use strict;
use warnings;

my @cases = (["short", "short sequences"], ["long", "long sequences"]);
return {
    title => "What does recomputation cost?",
    question => "With `--recompute block` a block keeps only its input, and its forward pass runs again in the backward pass. How " .
        "much memory does that free, and how much longer does a step take?",
    short => sub {
        my $d = shift;
        return sprintf "A rank keeps %s of the memory%s.", percent($d->value("short-block", "memory") / $d->value("short-none", "memory")),
            $d->speed ? ", and a step takes " . median_of($d->ratio("short-block", "short-none", "step_ms")) . " times as long" : "";
    },
    answer => sub {
        my $d = shift;
        return map {
            my ($case, $words) = @$_;
            my $share = $d->value("$case-block", "memory") / $d->value("$case-none", "memory");
            my $text = sprintf "With %s a rank keeps %s instead of %s, which is %s.", $words, bytes($d->value("$case-block", "memory")),
                bytes($d->value("$case-none", "memory")), percent($share);
            $text .= " A step takes " . times_range($d->ratio("$case-block", "$case-none", "step_ms")) . " times as long." if $d->speed;
            $text;
        } @cases;
    },
    table => sub {
        my $d = shift;
        my @rows = map {
            my $run = $_;
            my ($case) = $run =~ /^(\w+)-/;
            [$run, bytes($d->value($run, "memory")), bytes($d->value($run, "kinds/activations")), bytes($d->value($run, "sent")),
                $d->speed ? times_range($d->ratio($run, "$case-none", "step_ms")) : ()];
        } $d->runs;
        return ["run", "memory of a rank", "of it activations", "sent by a rank in a step", $d->speed ? "time of a step, beside none"
            : ()], @rows;
    },
    plot => sub {
        my $d = shift;
        return {title => "memory of a rank, MB", bars => [map { [$_, $d->value($_, "memory") / 1e6, bytes($d->value($_,
            "memory"))] } $d->runs]};
    },
    notes => "An extra forward pass is a third of the arithmetic of a block. Embedding, head and update are not repeated, so a " .
        "step of a whole model takes less than 4/3 of the time. No message is added: a block is gathered for its backward pass " .
        "anyway. [Chapter 4](../../doc/04_fsdp.md#recomputation-and-offload-memory-against-time) explains it.",
};
