#!/usr/bin/perl
# report.pl [--results FILE] [--out FOLDER] [EXPERIMENT...] - makes an experiment's page, README.md, and its plot.svg from its results.
#
# EXPERIMENT is a folder (default: all of this folder's, and the list of them). It has run.sh, which made the results, and answer.pl,
# which says what is asked of them; its `short` is the answer in the list. The newest file of its results counts, or --results. --out FOLDER writes there instead, into
# FOLDER/README.md, or for several experiments into FOLDER/EXPERIMENT/README.md.
#
# Whatever a page says of the results is computed from them here, so that nobody has to keep sentences and numbers in step.
use strict;
use warnings;
use File::Basename qw(basename dirname);
use File::Path qw(make_path);
use JSON::PP;

sub fail { print STDERR "error: ", @_, "\n"; exit 1 }

my ($results_file, $out);
while (@ARGV && $ARGV[0] =~ /^--(.*)/) {
    my $option = shift @ARGV;
    if ($option eq "--results" && @ARGV) { $results_file = shift @ARGV }
    elsif ($option eq "--out" && @ARGV) { $out = shift @ARGV }
    else { fail "report.pl knows --results FILE and --out FOLDER, not $option" }
}
my $here = dirname(__FILE__);
my @experiments = @ARGV ? map { s{/+$}{}r } @ARGV : sort map { dirname($_) } glob "$here/*/answer.pl";
my $with_list = !@ARGV;
fail "--results is for one experiment, not for ", scalar @experiments if defined $results_file && @experiments != 1;

# ---- numbers in words ----
sub bytes {
    my $b = shift;
    my ($unit, $by) = $b >= 1e9 ? ("GB", 1e9) : $b >= 1e6 ? ("MB", 1e6) : $b >= 1e3 ? ("kB", 1e3) : ("bytes", 1);
    my $x = $b / $by;
    return sprintf($by == 1 ? "%d %s" : $x >= 100 ? "%.0f %s" : $x >= 10 ? "%.1f %s" : "%.2f %s", $x, $unit);
}
sub count { # of parameters
    my $n = shift;
    return $n >= 1e9 ? sprintf("%.2f billion", $n / 1e9) : $n >= 1e6 ? sprintf("%.1f million", $n / 1e6) : sprintf("%.0f thousand",
        $n / 1e3);
}
sub percent { sprintf $_[0] < 0.1 ? "%.1f %%" : "%.0f %%", 100 * $_[0] }
# A ratio, and from where to where it goes over the rounds: [median, least, most].
sub times_range {
    my ($median, $least, $most) = @{$_[0]};
    my $text = sprintf "%.2f", $median;
    return $least == $most ? $text : sprintf "%s (%.2f to %.2f)", $text, $least, $most;
}
sub median_of { sprintf "%.2f", $_[0][0] } # of a ratio
# no_difference(RATIO...): what must be said where rounds differ by more than what is compared.
sub no_difference {
    return "" if grep { !($_->[1] < 1 && $_->[2] > 1) } @_;
    return @_ > 1 ? " Both ranges include 1, so these rounds show no difference." : " The range includes 1, so these rounds show no difference.";
}

# ---- the results ----
package Results;
sub median {
    my @x = sort { $a <=> $b } @_;
    return @x % 2 ? $x[@x / 2] : ($x[@x / 2 - 1] + $x[@x / 2]) / 2;
}
sub read_file {
    my $file = shift;
    open my $f, "<", $file or main::fail("$file: $!");
    my ($header, %rounds, @order);
    while (my $line = <$f>) {
        my $record = eval { JSON::PP::decode_json($line) } or main::fail("$file:$.: this line is no JSON object; run.sh makes the " .
            "file anew");
        if (($record->{record} // "") eq "header") { $header = $record; next }
        my $run = $record->{run} // main::fail("$file:$.: this line names no run");
        push @order, $run unless $rounds{$run};
        main::fail("$file:$.: round $record->{round} of $run is there twice") if $rounds{$run}{$record->{round}};
        $rounds{$run}{$record->{round}} = $record;
    }
    main::fail("$file: there is no line with \"record\":\"header\", so date and machine are unknown") unless $header;
    return bless {file => $file, header => $header, rounds => \%rounds, order => \@order}, shift // "Results";
}
sub runs { my ($d, $pattern) = @_; grep { !defined $pattern || /$pattern/ } @{$d->{order}} }
sub first { my ($d, $run) = @_; ($d->each_round($run))[0] }
sub each_round {
    my ($d, $run) = @_;
    my $rounds = $d->{rounds}{$run} or main::fail("$d->{file}: there is no run '$run'; run.sh makes the file anew");
    return map { $rounds->{$_} } sort { $a <=> $b } keys %$rounds;
}
sub refused { $_[0]->first($_[1])->{refused} }
sub speed { my $d = shift; $d->{header}{speed} && $d->{header}{speed} eq "yes" }
sub rounds { my $d = shift; my $n = 0; for (values %{$d->{rounds}}) { $n = keys %$_ if keys %$_ > $n } $n }
# value(RUN, KEY): the median over the rounds; KEY may be "shares/computing".
sub field {
    my ($d, $record, $key) = @_;
    my $value = $record;
    $value = ref $value eq "HASH" ? $value->{$_} : undef for split m{/}, $key;
    main::fail("$d->{file}: run '$record->{run}' has no $key") unless defined $value;
    return $value;
}
sub value { my ($d, $run, $key) = @_; median(map { $d->field($_, $key) } $d->each_round($run)) }
# ratio(RUN, BASE, KEY): [median, least, most] of the ratios in each round.
sub ratio {
    my ($d, $run, $base, $key) = @_;
    my @base = $d->each_round($base);
    my @ratios = map { my $r = $_; my ($b) = grep { $_->{round} == $r->{round} } @base; $b ? $d->field($r, $key) / $d->field($b, $key)
        : () } $d->each_round($run);
    my @sorted = sort { $a <=> $b } @ratios or main::fail("$d->{file}: '$run' and '$base' have no round in common");
    return [median(@sorted), $sorted[0], $sorted[-1]];
}
package main;

# ---- a plot: horizontal bars ----
# {title, mark => [value, text] (optional), bars => [[label, value, text], ...]}
sub svg_text { my $s = shift; $s =~ s/&/&amp;/g; $s =~ s/</&lt;/g; return $s }
sub svg {
    my $plot = shift;
    my @bars = @{$plot->{bars}};
    my ($most) = sort { $b <=> $a } map({ $_->[1] } @bars), $plot->{mark} ? $plot->{mark}[0] : ();
    my ($left, $width, $row) = (230, 350, 26);
    my $height = 44 + $row * @bars + ($plot->{mark} ? 18 : 6);
    my $x = sub { $left + $width * $_[0] / ($most || 1) };
    my $svg = sprintf qq{<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 %d" width="700" height="%d" font-family="sans-serif" font-size="12">\n}, $height, $height;
    $svg .= qq{<rect width="100%" height="100%" fill="white"/>\n} . sprintf qq{<text x="10" y="20" font-weight="bold">%s</text>\n}, svg_text($plot->{title});
    for my $i (0 .. $#bars) {
        my ($label, $value, $text) = @{$bars[$i]};
        my $y = 34 + $row * $i;
        $svg .= sprintf qq{<text x="%d" y="%d" text-anchor="end">%s</text>\n}, $left - 8, $y + 14, svg_text($label);
        $svg .= sprintf qq{<rect x="%d" y="%d" width="%.1f" height="18" fill="#3a86b7"/>\n}, $left, $y, $x->($value) - $left;
        $svg .= sprintf qq{<text x="%.1f" y="%d">%s</text>\n}, $x->($value) + 5, $y + 14, svg_text($text);
    }
    if ($plot->{mark}) {
        my ($value, $text) = @{$plot->{mark}};
        my $bottom = 34 + $row * @bars;
        $svg .= sprintf qq{<path d="M %.1f 30 V %d" stroke="#c1121f" stroke-dasharray="4 3" fill="none"/>\n}, $x->($value), $bottom;
        $svg .= sprintf qq{<text x="%.1f" y="%d" text-anchor="middle" fill="#c1121f">%s</text>\n}, $x->($value), $bottom + 13, svg_text($text);
    }
    return $svg . "</svg>\n";
}

# ---- a page ----
sub table { # rows of cells; the first row is the header
    my ($header, @rows) = @_;
    return join "", map { "| " . join(" | ", @$_) . " |\n" } $header, [map { "---" } @$header], @rows;
}
sub fold { # to 128 columns
    my ($text, @lines) = (shift);
    for my $word (split /\s+/, $text) {
        if (@lines && length("$lines[-1] $word") <= 128) { $lines[-1] .= " $word" }
        else { push @lines, $word }
    }
    return join("\n", @lines) . "\n";
}
sub command { # as typed: the run with its program
    my ($d, $r) = @_;
    my ($stage, $precision) = split /:/, $r->{stage};
    my $program = "train_gpt2_$stage" . ($precision ? " (PRECISION=$precision)" : "");
    return ($r->{ranks} > 1 ? "mpirun -np $r->{ranks} " : "") . "$program $r->{options}";
}
sub newest { my @files = sort glob "$_[0]/results/*.jsonl"; $files[-1] }

sub page {
    my ($folder, $file) = @_;
    my $name = basename($folder);
    my $answer = do(($folder =~ m{^/} ? "" : "./") . "$folder/answer.pl") // fail "$folder/answer.pl: ", $@ || $!;
    my $page = "# $answer->{title}\n\n" . fold($answer->{question}) . "\n";
    if (!defined $file) {
        $page .= fold("There are no results yet: `sh experiments/$name/run.sh` makes them, and then `perl experiments/report.pl " .
            "experiments/$name` " .
            "makes this page.") . "\n" . fold($answer->{notes});
        return ($page, undef);
    }
    my $d = Results::read_file($file);
    my $h = $d->{header};
    $page .= "## Answer\n\n" . join "\n", map { fold($_) } $answer->{answer}->($d);
    $page .= "\n" . fold("Speeds are not in these results: they were made for bytes, on a machine that was busy.") if !$d->speed
        && !$answer->{bytes_only};
    $page .= "\n" . fold("These are results of `--quick`: they show that the script works, and nothing else.") if $h->{quick};
    $page .= "\n" . fold("Other programs used $h->{busy_percent} % of the machine before the first run: do not trust the speeds.")
        if $d->speed && $h->{busy_percent} > 5;
    my $plot = $answer->{plot}->($d);
    $page .= "\n## Numbers\n\n" . table($answer->{table}->($d));
    $page .= "\n![" . $plot->{title} . "](plot.svg)\n" if $plot;
    my $rounds = $d->rounds;
    $page .= "\n## How\n\n" . fold("`sh experiments/$name/run.sh` made these runs" . ($rounds > 1 ? ", $rounds times in turns" : "")
        . ":") . "\n";
    for my $run ($d->runs) {
        my $r = $d->first($run);
        $page .= "    " . ($r->{stage} eq "plan" ? "build/plan, the line $run" : command($d, $r)) . "\n";
    }
    my $precise = $rounds > 1 && $d->speed ? " Where a figure has a range, it is from the least to the most of all rounds, and " .
        "before it is their median." : "";
    my $speeds = $d->speed ? " Times are medians of a run's steps without the first; ratios are formed within a round.$precise" : "";
    $page .= "\n" . fold("Measured on $h->{date} on $h->{machine}, at commit $h->{commit}.$speeds This page is made from `results/"
        . basename($file) .
        "` by `perl experiments/report.pl experiments/$name`.") . "\n" . fold($answer->{notes});
    return ($page, $plot && svg($plot), $answer->{short}->($d));
}
sub write_file {
    my ($file, $text) = @_;
    if (!defined $text) { unlink $file; return }
    make_path(dirname($file));
    open my $f, ">", $file or fail "$file: $!";
    print $f $text;
    close $f or fail "$file: $!";
}
my @list;
for my $folder (@experiments) {
    fail "$folder has no answer.pl, so it is no experiment" unless -e "$folder/answer.pl";
    my $file = $results_file // newest($folder);
    my ($page, $svg, $short) = page($folder, $file);
    my $to = !defined $out ? $folder : @experiments > 1 ? "$out/" . basename($folder) : $out;
    write_file("$to/README.md", $page);
    write_file("$to/plot.svg", $svg);
    my $d = defined $file ? Results::read_file($file) : undef;
    my ($title) = $page =~ /^# (.*)/;
    my $state = !$d ? "no results yet" : $d->{header}{date} . ($d->speed ? "" : ", bytes only");
    push @list, [sprintf("[%s](%s/README.md)", $title, basename($folder)), $short // "", "`sh experiments/" . basename($folder) . "/run.sh`", $state];
}
if ($with_list) {
    my $text = "# Experiments\n\n" . fold("One folder for each question: a script that makes the runs, their results in short, and a " .
        "page that is made from " .
        "these. `make experiments` runs all of them, in at most an hour on two cores. An experiment that is done is left out the " .
            "next time " .
        "(`rm build/experiments/*.done` to begin anew), so it can be interrupted. Where a GPU is there, the same scripts run on it. " .
        "[lib.sh](lib.sh) has the options that all scripts take, [report.pl](report.pl) makes the pages.") . "\n";
    write_file(($out // $here) . "/README.md", $text . table(["question", "answer in short", "command", "results"], @list));
}
