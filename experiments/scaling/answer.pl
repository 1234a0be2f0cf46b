# Read by experiments/report.pl.
use strict;
use warnings;

my %title = (ddp => "DDP", fsdp => "FSDP");
my @causes = (["computing", "computing"], ["all-gather", "exposed all-gathers"], ["reduce-scatter", "exposed reduce-scatters"],
    ["all-reduce", "exposed all-reduces"],
    ["waiting", "waiting for the slower rank"], ["data", "waiting for data"], ["rest", "without a core, or asleep"]);
sub scaling_share { # of half a step of one rank, which a step of two would take at best
    my ($d, $stage, $cause) = @_;
    my @shares;
    for my $two ($d->each_round("$stage-strong-2")) {
        my ($one) = grep { $_->{round} == $two->{round} } $d->each_round("$stage-strong-1");
        push @shares, ($two->{shares}{$cause} // 0) / ($one->{step_ms} / 2);
    }
    return Results::median(@shares);
}
sub scaling_parts { # [cause, share of half a step of one rank], the largest first; shares of less than 1 % are left out
    my ($d, $stage) = @_;
    return sort { $b->[1] <=> $a->[1] } grep { $_->[1] >= 0.01 } map { $_->[0] eq "computing"
        ? ["slower computing", scaling_share($d, $stage, "computing") - 1] : [$_->[1], scaling_share($d, $stage, $_->[0])] } @causes;
}
return {
    title => "Why are two ranks not twice as fast?",
    question => "A step on two ranks would take half as long as on one, if nothing but its arithmetic counted. How long does it " .
        "take, and where is the rest: data loading, all-reduces, gathers, waiting? And what does a rank keep?",
    short => sub {
        my $d = shift;
        return "Speeds are not measured." if !$d->speed;
        return sprintf "They are %s times as fast with DDP, and %s times with FSDP. What they lose most by: %s.",
            map({ median_of($d->ratio("$_-strong-2", "$_-strong-1", "tokens_per_s")) } qw(ddp fsdp)),
            join "; ", map { $_->[0] } grep { defined } (scaling_parts($d, "ddp"))[0, 1];
    },
    answer => sub {
        my $d = shift;
        return ("A rank of two keeps " . join(" and ", map { bytes($d->value("$_-strong-2", "memory"))
            . " ($title{$_})" } qw(ddp fsdp)) . ".") if !$d->speed;
        my @texts;
        for my $stage (qw(ddp fsdp)) {
            my $ratio = $d->ratio("$stage-strong-2", "$stage-strong-1", "tokens_per_s");
            my @parts = scaling_parts($d, $stage);
            push @texts, sprintf "%s on two ranks reaches %s times the tokens per second of one rank with the same batch: an " .
                "efficiency of %s.", $title{$stage}, times_range($ratio),
                percent($ratio->[0] / 2);
            push @texts, !@parts ? "No cause takes 1 % of half of one rank's step." : sprintf "Its step is longer than half of one " .
                "rank's by these parts, as shares of that half: %s.",
                join ", ", map { "$_->[0] " . percent($_->[1]) } @parts;
            push @texts, sprintf "With the same batch on each rank it reaches %s times.", times_range($d->ratio("$stage-strong-2",
                "$stage-weak-1", "tokens_per_s"));
        }
        return @texts;
    },
    table => sub {
        my $d = shift;
        my @rows = map { my $key = $_; [$_->[1], map { percent(scaling_share($d, $_, $key->[0])) } qw(ddp fsdp)] } $d->speed ? @causes : ();
        return ["", "DDP", "FSDP"],
            ["memory of one rank", map { bytes($d->value("$_-strong-1", "memory")) } qw(ddp fsdp)], ["memory of each of two",
                map { bytes($d->value("$_-strong-2", "memory")) } qw(ddp fsdp)],
            ["sent by each of two in a step", map { bytes($d->value("$_-strong-2", "sent")) } qw(ddp fsdp)],
            $d->speed ? (["tokens per second of two, beside one: same batch", map { times_range($d->ratio("$_-strong-2", "$_-strong-1",
                "tokens_per_s")) } qw(ddp fsdp)],
                ["the same batch on each rank", map { times_range($d->ratio("$_-strong-2", "$_-weak-1", "tokens_per_s")) } qw(ddp fsdp)],
                ["*a step of two, of half a step of one:*", "", ""]) : (), @rows;
    },
    plot => sub {
        my $d = shift;
        return undef if !$d->speed;
        return {title => "tokens per second of two ranks, beside one", mark => [2, "twice"], bars => [map {
            my ($stage, $kind) = @$_;
            my $ratio = $d->ratio("$stage-strong-2", "$stage-$kind-1", "tokens_per_s");
            [$title{$stage} . ($kind eq "strong" ? ", same batch" : ", same on each"), $ratio->[0], sprintf("%.2f", $ratio->[0])]
        } ["ddp", "strong"], ["ddp", "weak"], ["fsdp", "strong"], ["fsdp", "weak"]]};
    },
    notes => "Each row of the table from computing on is a mean of both ranks, as the programs' diagnosis has it. Computing can " .
        "take more than half of one rank's time: two ranks share caches and the memory's bandwidth, smaller products are less " .
        "efficient, and in DDP each rank updates all parameters. [Chapter 2](../../doc/02_ddp.md#how-fast-it-gets) has four ranks " .
        "on two cores.",
};
