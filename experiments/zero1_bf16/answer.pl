# Read by experiments/report.pl.
use strict;
use warnings;

sub zero1_promised { my $n = shift; (4 + 12 / $n) / 16 }
return {
    title => "Does ZeRO stage 1 save as much as it promises?",
    question => "In bf16 DDP keeps 16 bytes of state per parameter on each rank: 2 for parameters, 2 for gradients, 12 for the " .
        "optimizer's state. Stage 1 divides the 12 by the number of ranks. On small models buffers and activations hide the " .
        "saving. How near does the total of a rank come to the promise, at a size where they do not?",
    bytes_only => 1,
    short => sub {
        my $d = shift;
        return "A rank keeps of DDP's whole memory " . join(", and ", map {
            my ($n) = /-(\d+)$/;
            sprintf "%.1f %% on %d ranks, where %.1f %% is promised of its state", 100 * $d->value("zero1-$n", "memory")
                / $d->value("ddp-$n", "memory"), $n, 100 * zero1_promised($n);
        } $d->runs("^ddp-")) . ".";
    },
    answer => sub {
        my $d = shift;
        return map {
            my ($n) = /-(\d+)$/;
            my ($ddp, $zero) = map { $d->value("$_-$n", "memory") } qw(ddp zero1);
            sprintf "On %d ranks a model of %s parameters takes %s per rank with DDP and %s with stage 1, activations and everything " .
                "else counted: %.1f %% " .
                "of DDP's total, where %.1f %% of its state is promised.", $n, count($d->value("ddp-$n", "parameters")), bytes($ddp),
                    bytes($zero), 100 * $zero / $ddp,
                100 * zero1_promised($n);
        } $d->runs("^ddp-");
    },
    table => sub {
        my $d = shift;
        return ["run", "parameters", "gradients", "optimizer state", "everything else", "total of a rank", "of DDP's",
            "promised of the state", "sent by a rank in a step"], map {
            my ($stage, $n) = /^(\w+)-(\d+)$/;
            my @kinds = map { $d->value("$stage-$n", "kinds/$_") } "parameters", "gradients", "optimizer state";
            my $total = $d->value($_, "memory");
            [$stage eq "ddp" ? "DDP, $n ranks" : "stage 1, $n ranks", map({ bytes($_) } @kinds,
                $total - $kinds[0] - $kinds[1] - $kinds[2], $total),
                sprintf("%.1f %%", 100 * $total / $d->value("ddp-$n", "memory")), $stage eq "ddp" ? "" : sprintf("%.1f %%",
                    100 * zero1_promised($n)),
                bytes($d->value($_, "sent"))]
        } $d->runs;
    },
    plot => sub {
        my $d = shift;
        return {title => "all memory of a rank, GB", bars => [map {
            my ($stage, $n) = /^(\w+)-(\d+)$/;
            [$stage eq "ddp" ? "DDP, $n ranks" : "stage 1, $n ranks", $d->value($_, "memory") / 1e9, bytes($d->value($_, "memory"))]
        } $d->runs]};
    },
    notes => "The bytes are what the programs allocated, and as predicted by formula, or they would have failed. [Chapter " .
        "3](../../doc/03_zero.md#where-the-savings-do-not-show) has sizes at which the saving does not show, and [the notes on the " .
        "ZeRO paper](../../doc/papers.md#zero) have its table.",
};
