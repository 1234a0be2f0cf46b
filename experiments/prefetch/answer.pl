# Read by experiments/report.pl.
use strict;
use warnings;

sub prefetch_link { my ($rate) = $_[0]->first("link-none")->{options} =~ /--emulate-link (\S+)/; "$rate Gbit/s" }
sub prefetch_words { my ($d, $run) = @_; $run =~ s/^link-(.*)/"$1, " . prefetch_link($d)/er }
sub prefetch_share { my ($d, $run) = @_; percent($d->value($run, "comm_exposed_ms") / $d->value($run, "step_ms")) }
sub prefetch_answer {
    my ($d, $link, $where) = @_;
    my $share = sub { prefetch_share($d, "$link$_[0]") };
    my $times = sub { times_range($d->ratio("$link$_[0]", "$link$_[1]", "step_ms")) };
    return (
        sprintf("%s exposed communication takes %s of a step with none, %s with backward-post and %s with backward-pre.", $where,
            map { $share->($_) } qw(none backward-post backward-pre)),
        sprintf("A step with backward-post takes %s times as long as one with none, and one with backward-pre %s times.%s",
            $times->("backward-post", "none"), $times->("backward-pre", "none"),
            no_difference(map { $d->ratio("$link$_", "${link}none", "step_ms") } qw(backward-post backward-pre))),
        sprintf("Without gathering ahead in the forward pass %s of a step are exposed, and it takes %s times as long as with " .
            "backward-pre, which does both.", $share->("no-forward"), $times->("no-forward", "backward-pre")),
    );
}
return {
    title => "What does gathering ahead gain?",
    question => "FSDP gathers a block before its backward pass: when it is needed (`--prefetch none`), when the block before it " .
        "has its gradients (`backward-post`), or before that block's backward pass (`backward-pre`, the default). How much of a " .
        "step is then exposed, and how long does it take? And what if the forward pass does not gather ahead? Ranks of one machine " .
        "exchange data by copying, which takes the cores that compute. So each is also run over an emulated link (`--emulate-link`), " .
        "which carries data while the cores compute, as a network does.",
    short => sub {
        my $d = shift;
        return "Bytes are the same." if !$d->speed;
        return join " ", map {
            my ($link, $where) = @$_;
            sprintf "%s %s instead of %s of a step are exposed, and it takes %s times as long.", $where,
                map({ prefetch_share($d, "$link$_") } qw(backward-pre none)), median_of($d->ratio("${link}backward-pre", "${link}none", "step_ms"))
        } ["", "On the own link"], ["link-", "Over " . prefetch_link($d)];
    },
    answer => sub {
        my $d = shift;
        return ("All of them send " . bytes($d->value("none", "sent")) . " and keep " . bytes($d->value("none", "memory"))
            . " per rank.") if !$d->speed;
        return map { prefetch_answer($d, @$_) } ["", "On this machine's own link"], ["link-", "Over a link of " . prefetch_link($d)];
    },
    table => sub {
        my $d = shift;
        my @speeds = $d->speed ? ("exposed, of a step", "time of a step, beside none over the same link") : ();
        return ["run", "memory of a rank", "sent by a rank in a step", @speeds], map {
            my ($link) = /^(link-)?/;
            [prefetch_words($d, $_), bytes($d->value($_, "memory")), bytes($d->value($_, "sent")), $d->speed ? (percent($d->value($_,
                "comm_exposed_ms") / $d->value($_, "step_ms")), times_range($d->ratio($_, ($link // "") . "none", "step_ms"))) : ()]
        } $d->runs;
    },
    plot => sub {
        my $d = shift;
        return undef if !$d->speed;
        return {title => "exposed communication, share of a step", bars => [map {
            my $share = $d->value($_, "comm_exposed_ms") / $d->value($_, "step_ms");
            [prefetch_words($d, $_), $share, percent($share)]
        } $d->runs]};
    },
    notes => "[Chapter 4](../../doc/04_fsdp.md#prefetch-three-timelines) has the timelines. Hidden communication is not free: " .
        "where it shares cores or processors with computing, a step gains less than what is hidden.",
};
