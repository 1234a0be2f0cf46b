# Read by experiments/report.pl. A run is one-T-C or two-T-C: sequences of T tokens, C channels.
use strict;
use warnings;

sub two_ranks_lengths { my ($d, %seen) = shift; grep { !$seen{$_}++ } map { /^one-(\d+)-/ } $d->runs }
sub two_ranks_gain { my ($d, $size) = @_; $d->ratio("two-$size", "one-$size", "tokens_per_s") }
sub two_ranks_exposed { my ($d, $size) = @_; $d->value("two-$size", "comm_exposed_ms") / $d->value("two-$size", "step_ms") }
sub two_ranks_answer { # for sequences of one length
    my ($d, $length) = @_;
    my @widths = map { /^one-$length-(\d+)/ } $d->runs;
    my %gain = map { $_ => two_ranks_gain($d, "$length-$_") } @widths;
    my $parameters = sub { count($d->value("one-$length-$_[0]", "parameters")) };
    my @slower = grep { $gain{$_}[0] < 1 } @widths;
    my @faster = grep { $gain{$_}[0] >= 1 } @widths;
    my $found = !@slower ? "two ranks are faster at every size that was tried, even with " . $parameters->($widths[0]) . " parameters"
        : !@faster ? "two ranks are slower at every size that was tried, even with " . $parameters->($widths[-1]) . " parameters"
        : $slower[-1] > $faster[0] ? "the sizes at which two ranks are slower and those at which they are faster are mixed, so these " .
            "runs do not answer it"
        : sprintf("two ranks are slower than one up to %d channels (%s parameters), and faster from %d on (%s parameters)", $slower[-1],
            $parameters->($slower[-1]), $faster[0], $parameters->($faster[0]));
    my @unclear = grep { $gain{$_}[1] < 1 && $gain{$_}[2] > 1 } @widths;
    $found .= ", each by its median; with " . join(", ", @unclear) . " channels the rounds differ about it" if @unclear;
    return sprintf "With sequences of %d tokens %s. With %d channels they reach %s times one rank's tokens per second, and with %d " .
        "channels %s times. Exposed communication takes %s of their step with %d channels, and %s with %d.", $length, $found,
        $widths[0], times_range($gain{$widths[0]}), $widths[-1], times_range($gain{$widths[-1]}),
        map { (percent(two_ranks_exposed($d, "$length-$_")), $_) } @widths[0, -1];
}
return {
    title => "When do two ranks stop being slower than one?",
    question => "Two ranks share a batch (DDP). If the model is small, messages and waiting take longer than the half of the work " .
        "that is saved. At which size does the second rank begin to gain? And does it gain earlier if a step has more tokens?",
    short => sub {
        my $d = shift;
        return "Speeds are not measured." if !$d->speed;
        return join " ", map {
            my $length = $_;
            my ($first) = grep { two_ranks_gain($d, "$length-$_")->[0] >= 1 } map { /^one-$length-(\d+)/ } $d->runs;
            defined $first ? "From $first channels on with $length tokens in a sequence." : "At no size that was tried with $length tokens in a sequence.";
        } two_ranks_lengths($d);
    },
    answer => sub {
        my $d = shift;
        return map { two_ranks_answer($d, $_) } two_ranks_lengths($d) if $d->speed;
        return "A rank of two sends " . join(", ", map { bytes($d->value($_, "sent")) } $d->runs("^two-")) . " in a step.";
    },
    table => sub {
        my $d = shift;
        my @speeds = $d->speed ? ("tokens per second of two, beside one", "exposed, of a step of two") : ();
        return ["tokens of a sequence", "channels", "parameters", "memory of one rank", "of each of two", "sent by a rank in a step", @speeds], map {
            my ($size, $length, $channels) = /-((\d+)-(\d+))/;
            [$length, $channels, count($d->value($_, "parameters")), bytes($d->value($_, "memory")), bytes($d->value("two-$size", "memory")),
                bytes($d->value("two-$size", "sent")),
                $d->speed ? (times_range(two_ranks_gain($d, $size)), percent(two_ranks_exposed($d, $size))) : ()]
        } $d->runs("^one-");
    },
    plot => sub {
        my $d = shift;
        return undef if !$d->speed;
        return {title => "tokens per second of two ranks, beside one", mark => [1, "one rank"], bars => [map {
            my ($length, $channels) = /-(\d+)-(\d+)/;
            my $gain = two_ranks_gain($d, "$length-$channels");
            ["$length tokens, $channels channels", $gain->[0], sprintf("%.2f", $gain->[0])]
        } $d->runs("^one-")]};
    },
    notes => "The size depends on the link, on the tokens of a step and on how fast a rank computes: gradients are as many for any " .
        "number of tokens, and each rank of DDP updates all parameters. " .
        "[Chapter 2](../../doc/02_ddp.md#where-the-time-went) shows what a run itself says about it.",
};
