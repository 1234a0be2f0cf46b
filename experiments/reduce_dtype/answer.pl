# Read by experiments/report.pl.
use strict;
use warnings;

my %words = (fp32 => "sums in fp32", model => "sums in bf16");
return {
    title => "In which type should gradients be summed?",
    question => "With numbers of 16 bits FSDP can send and add gradients in fp32 (`--reduce-dtype fp32`, the default) or in 16 " .
        "bits (`model`). What do the wider sums cost, and what do they change?",
    short => sub {
        my $d = shift;
        return sprintf "Sums in bf16 send %s of the bytes, and change the loss by %.2g after %d steps.", percent($d->value("model",
            "sent") / $d->value("fp32", "sent")), abs($d->value("fp32", "loss") - $d->value("model", "loss")), $d->value("fp32", "steps");
    },
    answer => sub {
        my $d = shift;
        my $text = sprintf "With sums in fp32 a rank sends %s in a step, and with sums in bf16 %s, which is %s. It keeps %s and %s.",
            bytes($d->value("fp32", "sent")), bytes($d->value("model", "sent")), percent($d->value("model", "sent") / $d->value("fp32",
                "sent")),
            bytes($d->value("fp32", "memory")), bytes($d->value("model", "memory"));
        $text .= " With sums in bf16 a step takes " . times_range($d->ratio("model", "fp32", "step_ms")) . " times as long." . no_difference($d->ratio("model", "fp32", "step_ms")) if $d->speed;
        return ($text, sprintf("After %d steps the losses are %.4g and %.4g, %.2g apart.", $d->value("fp32", "steps"),
            $d->value("fp32", "loss"),
            $d->value("model", "loss"), abs($d->value("fp32", "loss") - $d->value("model", "loss"))));
    },
    table => sub {
        my $d = shift;
        return ["", "memory of a rank", "sent by a rank in a step", "loss", $d->speed ? "time of a step" : ()], map {
            [$words{$_}, bytes($d->value($_, "memory")), bytes($d->value($_, "sent")), sprintf("%.4g", $d->value($_, "loss")),
                $d->speed ? times_range($d->ratio($_, "fp32", "step_ms")) : ()]
        } $d->runs;
    },
    plot => sub {
        my $d = shift;
        return {title => "sent by a rank in a step, MB", bars => [map { [$words{$_}, $d->value($_, "sent") / 1e6, bytes($d->value($_,
            "sent"))] } $d->runs]};
    },
    notes => "Two ranks add two numbers, so little is lost here. The error of a sum in 16 bits grows with the ranks. [Chapter " .
        "4](../../doc/04_fsdp.md#mixed-precision) says where each type is used.",
};
