# Read by experiments/report.pl.
use strict;
use warnings;

my %words = (device => "shards on the device", host => "shards on the host", recomputed => "shards on the host and blocks recomputed");
return {
    title => "What does offloading cost?",
    question => "With `--cpu-offload` a rank's shards of parameters, gradients and moments are on the host, and AdamW runs there. " .
        "How much device memory does that free, and how much longer does a step take?",
    short => sub {
        my $d = shift;
        return sprintf "A rank keeps %s of the device memory, and %s with recomputed blocks.%s",
            map({ percent($d->value($_, "memory") / $d->value("device", "memory")) } qw(host recomputed)), !$d->speed ? ""
            : sprintf " A step takes %s and %s times as long.", map { median_of($d->ratio($_, "device", "step_ms")) } qw(host recomputed);
    },
    answer => sub {
        my $d = shift;
        my @texts;
        for my $run (qw(host recomputed)) {
            my $text = sprintf "With %s a rank keeps %s on the device, which is %s of %s, and %s on the host.", $words{$run},
                bytes($d->value($run, "memory")),
                percent($d->value($run, "memory") / $d->value("device", "memory")), bytes($d->value("device", "memory")),
                    bytes($d->value($run, "host"));
            $text .= " A step takes " . times_range($d->ratio($run, "device", "step_ms")) . " times as long." . no_difference($d->ratio($run, "device", "step_ms")) if $d->speed;
            push @texts, $text;
        }
        push @texts, "This ran on a CPU, where host and device are the same memory: a copy between them stays within it, and the " .
            "time of PCIe is missing."
            if $d->{header}{device} eq "cpu";
        return @texts;
    },
    table => sub {
        my $d = shift;
        my @rows = map { [$words{$_}, bytes($d->value($_, "memory")), bytes($d->value($_, "host")), bytes($d->value($_, "sent")),
            $d->speed ? times_range($d->ratio($_, "device", "step_ms")) : ()] } $d->runs;
        return ["", "device memory of a rank", "on the host", "sent by a rank in a step", $d->speed ? "time of a step" : ()], @rows;
    },
    plot => sub {
        my $d = shift;
        return {title => "device memory of a rank, MB", bars => [map { [$words{$_}, $d->value($_, "memory") / 1e6, bytes($d->value($_,
            "memory"))] } $d->runs]};
    },
    notes => "[Chapter 4](../../doc/04_fsdp.md#offload) says what is copied when.",
};
