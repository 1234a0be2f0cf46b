# Read by experiments/report.pl.
use strict;
use warnings;

my %words = (fp32 => "FSDP, sums in fp32", model => "FSDP, sums in bf16", ddp => "DDP, predicted");
return {
    title => "Can this machine train a billion parameters?",
    question => "DDP keeps the whole state of a model on each rank, 16 bytes per parameter in bf16. FSDP divides it. Does a model " .
        "of a billion parameters train on two ranks of one machine, and what does it take to fit?",
    bytes_only => 1,
    short => sub {
        my $d = shift;
        return sprintf "Under FSDP %s parameters take %s on each of two ranks; DDP would take %s.", count($d->value("fp32", "parameters")),
            map { bytes($d->value($_, "memory")) } qw(fp32 ddp);
    },
    answer => sub {
        my $d = shift;
        my ($ddp, $fp32, $bf16) = map { $d->value($_, "memory") } qw(ddp fp32 model);
        return (
            sprintf("%s parameters train: FSDP keeps %s on each of two ranks, %s in all. With sums of gradients in bf16 it keeps %s, " .
                "%s in all.",
                ucfirst count($d->value("fp32", "parameters")), bytes($fp32), bytes(2 * $fp32), bytes($bf16), bytes(2 * $bf16)),
            sprintf("DDP would keep %s on each rank, %s in all, %.1f times as much. The machine: %s.", bytes($ddp), bytes(2 * $ddp),
                $ddp / $fp32, $d->{header}{machine}),
            sprintf("With sums in fp32 the loss is %.3g in the first step and %.3g in step %d. A rank sends %s in each step, and " .
                "with sums in bf16 %s.", $d->value("fp32", "first_loss"),
                $d->value("fp32", "loss"), $d->value("fp32", "steps"), bytes($d->value("fp32", "sent")), bytes($d->value("model", "sent"))) . ($d->speed ? sprintf(" Exposed communication takes %s of a " .
                "step.", percent($d->value("fp32", "comm_exposed_ms") / $d->value("fp32", "step_ms"))) : ""),
            "What makes it fit: blocks are recomputed, so that activations are " . bytes($d->value("fp32", "kinds/activations"))
                . "; a rank has a sequence of 64 " .
                "tokens; the vocabulary is bytes; and besides its shards a rank has " . bytes($d->value("fp32", "kinds/communication"))
                    . " for gathered blocks and buckets.",
        );
    },
    table => sub {
        my $d = shift;
        return ["run", "parameters", "gradients", "optimizer state", "activations", "rooms and buckets", "total of a rank",
            "both ranks", "sent by a rank in a step"], map {
            my $run = $_;
            my @kinds = $run eq "ddp" ? ("") x 5 : map { bytes($d->value($run, "kinds/$_")) } "parameters", "gradients",
                "optimizer state", "activations", "communication";
            [$words{$run}, @kinds, bytes($d->value($run, "memory")), bytes(2 * $d->value($run, "memory")), bytes($d->value($run, "sent"))]
        } $d->runs;
    },
    plot => sub {
        my $d = shift;
        return {title => "memory of both ranks, GB", bars => [map { [$words{$_}, 2 * $d->value($_, "memory") / 1e9,
            bytes(2 * $d->value($_, "memory"))] } $d->runs]};
    },
    notes => "A checkpoint of this model has 12 bytes per parameter, so the script ends each run after its last step without one. " .
        "One process alone could hold the state in the same memory. The two copies that DDP needs on two ranks do not fit.",
};
