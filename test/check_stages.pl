#!/usr/bin/perl
# check_stages.pl [LIST] [FOLDER] - make check-stages: checks that the stages differ only where they must.
# Each stage file is compared with the one before it, definition by definition: a definition is a top-level function, struct,
# macro or section heading, with the comment directly above it. Definitions that both files have must be the same, byte for byte,
# and in the same order, except those that LIST (test/stages.list) names with a reason. A definition on the list must differ, so
# that the list stays true. One line for each pair then says how much is new. Status 1 if a stage differs without a reason.
use strict;
use warnings;

my $list = $ARGV[0] // 'test/stages.list';
my $folder = $ARGV[1] // '.';
my @order = map { "train_gpt2_$_.cu" } qw(single ddp zero fsdp tp pp 3d);
my @stages = grep { -e "$folder/$_" } @order;
die "check_stages.pl: $folder has no train_gpt2_single.cu\n" unless @stages && $stages[0] eq $order[0];
my $failed = 0;
sub complain { print @_, "\n"; $failed = 1 }

# The definitions of a stage: their names in order, and their text by name.
sub definitions {
    my ($path) = @_;
    my (@names, %text);
    my $above = '';
    open my $in, '<', $path or die "check_stages.pl: $path: $!\n";
    while (my $line = <$in>) {
        my $name;
        if ($line =~ m{^// (\d+\. .*)}) { $name = "section $1" }
        elsif ($line =~ m{^//}) { $above .= $line; next }
        elsif ($line =~ /^#define (\w+)/ || $line =~ /^typedef .*\b(\w+);/) { $name = $1 }
        elsif ($line =~ /^(?:static |int )[^=;(]*?\b(\w+)\(/) { $name = $1 }
        my $text = $above . $line;
        if ($line =~ /^(?:static|int|typedef)\b/ && $line !~ m{[;\}]\s*(?://.*)?$}) { # to the closing brace at the left
            while ($line = <$in>) {
                $text .= $line;
                last if $line =~ /^\}/;
            }
            $name = $1 if defined $line && $line =~ /^\} (\w+);/;
        }
        $above = '';
        next unless defined $name;
        die "check_stages.pl: $path: $name is there twice\n" if exists $text{$name};
        push @names, $name;
        $text{$name} = $text;
    }
    return { names => \@names, text => \%text };
}

# What may differ: {later stage}{name} = reason.
my %reason;
open my $in, '<', $list or die "check_stages.pl: $list: $!\n";
while (<$in>) {
    next if /^\s*(#.*)?$/;
    /^(\w+) +(\w+) +(\S.*)$/ or die "check_stages.pl: $list:$.: expected STAGE NAME REASON, not '$_'\n";
    die "check_stages.pl: $list:$.: $1 $2 is there twice\n" if exists $reason{"train_gpt2_$1.cu"}{$2};
    $reason{"train_gpt2_$1.cu"}{$2} = $3;
}

my %of = map { $_ => definitions("$folder/$_") } @stages;
for my $i (1 .. $#stages) {
    my ($before, $stage) = @stages[$i - 1, $i];
    my ($a, $b) = @of{$before, $stage};
    my $allowed = $reason{$stage} || {};
    my ($same, $differ, $new) = (0, 0, 0);
    for my $name (@{$a->{names}}) {
        my $there = exists $b->{text}{$name};
        if ($there && $a->{text}{$name} eq $b->{text}{$name}) {
            $same++;
            complain("$stage: $name is the same as in $before, though $list says: $allowed->{$name}") if $allowed->{$name};
        } elsif ($allowed->{$name}) { $differ++ }
        else { complain("$stage: $name ", $there ? "differs from" : "is missing, unlike", " $before: make them the same, or give the reason in $list") }
    }
    for my $name (@{$b->{names}}) {
        $new++ unless exists $a->{text}{$name};
    }
    for my $name (sort keys %$allowed) {
        complain("$list: $name is not in $before") unless exists $a->{text}{$name};
    }
    my @shared = grep { exists $a->{text}{$_} } @{$b->{names}};
    my @expected = grep { exists $b->{text}{$_} } @{$a->{names}};
    for my $j (0 .. $#shared) {
        next if $shared[$j] eq $expected[$j];
        complain("$stage: $shared[$j] comes where $before has $expected[$j]: keep the order");
        last;
    }
    my $diff = `diff '$folder/$before' '$folder/$stage'`;
    my $added = () = $diff =~ /^>/mg;
    my $removed = () = $diff =~ /^</mg;
    print "$before -> $stage: $same definitions are the same, $differ differ, $new are new; $added lines added, $removed removed\n";
}
for my $stage (sort keys %reason) {
    complain("$list: there is no $stage with a stage before it") unless grep { $_ eq $stage } @stages[1 .. $#stages];
}
exit $failed;
