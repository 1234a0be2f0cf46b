# Read by experiments/report.pl.
use strict;
use warnings;

my %words = ("ddp-1" => "DDP, the small model", "fsdp-1" => "FSDP, the small model", "ddp-2" => "DDP, twice the depth",
    "fsdp-2" => "FSDP, twice the depth",
    "fsdp-3" => "FSDP, three times the depth", "fsdp-8" => "FSDP, eight times, on the host");
sub out_of_memory_limit { my $d = shift; my ($limit) = $d->first("ddp-1")->{options} =~ /--memory-limit (\S+)/; bytes(1e9 * $limit) }
return {
    title => "What does FSDP train where DDP is out of memory?",
    question => "Two ranks may use a fixed amount of memory each, as if that were their device's. Which models fit DDP, and which " .
        "FSDP?",
    short => sub {
        my $d = shift;
        return sprintf "With %s on each rank DDP trains %s parameters, FSDP %s, and with shards on the host %s.", out_of_memory_limit($d),
            map { count($d->value($_, "parameters")) } qw(ddp-1 fsdp-3 fsdp-8);
    },
    answer => sub {
        my $d = shift;
        my $limit = out_of_memory_limit($d);
        my @texts = (
            sprintf("A rank may use %s. A model of %s parameters fits both: DDP keeps %s of it on a rank, and FSDP %s.", $limit,
                count($d->value("ddp-1", "parameters")),
                bytes($d->value("ddp-1", "memory")), bytes($d->value("fsdp-1", "memory"))),
            sprintf("With %s parameters DDP %s. FSDP keeps %s.", count($d->value("fsdp-2", "parameters")),
                $d->refused("ddp-2") ? "ends with \"" . ($d->refused("ddp-2") =~ s/;.*//r) . "\"" : "still fits",
                    bytes($d->value("fsdp-2", "memory"))),
            sprintf("FSDP also trains %s parameters in %s, and with shards on the host %s in %s, and %s there.",
                count($d->value("fsdp-3", "parameters")),
                bytes($d->value("fsdp-3", "memory")), count($d->value("fsdp-8", "parameters")), bytes($d->value("fsdp-8", "memory")),
                    bytes($d->value("fsdp-8", "host"))),
        );
        return @texts if !$d->speed;
        my $speed = $d->ratio("fsdp-1", "ddp-1", "tokens_per_s");
        return (@texts, "Where both fit, FSDP reaches " . times_range($speed) . " times DDP's tokens per second." . no_difference($speed));
    },
    table => sub {
        my $d = shift;
        return ["run", "parameters", "memory of a rank", "on the host", "sent by a rank in a step", $d->speed
            ? "tokens per second, beside DDP with the small model" : ()], map {
            $d->refused($_) ? [$words{$_}, "", "out of memory", "", "", $d->speed ? "" : ()]
            : [$words{$_}, count($d->value($_, "parameters")), bytes($d->value($_, "memory")), $d->value($_, "host")
                ? bytes($d->value($_, "host")) : "",
                bytes($d->value($_, "sent")), $d->speed ? times_range($d->ratio($_, "ddp-1", "tokens_per_s")) : ()]
        } $d->runs;
    },
    plot => sub {
        my $d = shift;
        my ($limit) = $d->first("ddp-1")->{options} =~ /--memory-limit (\S+)/;
        return {title => "memory of a rank, MB", mark => [1e3 * $limit, "limit"], bars => [map {
            $d->refused($_) ? [$words{$_}, 0, "out of memory"] : [$words{$_}, $d->value($_, "memory") / 1e6, bytes($d->value($_, "memory"))]
        } $d->runs]};
    },
    notes => "A larger model computes more for each token, so its tokens per second are fewer for that reason alone. [Chapter " .
        "4](../../doc/04_fsdp.md#a-model-that-ddp-has-no-memory-for) has the same on four ranks.",
};
