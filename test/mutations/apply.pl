#!/usr/bin/perl
# apply.pl LIST              prints a line for each mutation, tab-separated: name, tests, why it survives (or -), what it is
# apply.pl LIST NAME FOLDER  applies one mutation to the sources in FOLDER
# The list's head explains its format. Lines are compared without leading and trailing blanks; the old lines must follow one
# another in exactly one place of the file, or this fails: a mutation that is not applied would seem to survive.
use strict;
use warnings;

my ($list, $wanted, $folder) = @ARGV;
my (@mutations, $m);
sub trimmed { my $line = shift; $line =~ s/^\s+|\s+$//g; return $line }
sub wrong { die "apply.pl: $list:$.: $_[0]\n" }

open my $in, '<', $list or die "apply.pl: $list: $!\n";
while (<$in>) {
    chomp;
    if (/^\s*(#.*)?$/) { next }
    elsif (/^== ([\w-]+)$/) { push @mutations, $m = { name => $1, old => [], new => [], survives => '-' } }
    elsif (!$m) { wrong("'$_' comes before the first mutation") }
    elsif (/^(file|what|tests|survives) +(\S.*)$/) { $m->{$1} = $2 }
    elsif (/^- (.*)$/) { push @{$m->{old}}, trimmed($1) }
    elsif (/^\+ (.*)$/) { push @{$m->{new}}, trimmed($1) }
    else { wrong("'$_' is not a line of a mutation") }
}
my %seen;
for $m (@mutations) {
    for my $field (qw(file what tests)) { die "apply.pl: $list: $m->{name} has no '$field'\n" unless $m->{$field} }
    die "apply.pl: $list: $m->{name} is there twice\n" if $seen{$m->{name}}++;
    die "apply.pl: $list: $m->{name} changes nothing\n" if "@{$m->{old}}" eq "@{$m->{new}}";
}
if (!defined $wanted) {
    print join("\t", @$_{qw(name tests survives what)}), "\n" for @mutations;
    exit 0;
}

($m) = grep { $_->{name} eq $wanted } @mutations or die "apply.pl: $list has no mutation '$wanted'\n";
my $path = "$folder/$m->{file}";
open my $source, '<', $path or die "apply.pl: $path: $!\n";
my @lines = <$source>;
close $source;
my $length = @{$m->{old}};
my @places = grep { my $at = $_; !grep { trimmed($lines[$at + $_]) ne $m->{old}[$_] } 0 .. $length - 1 } 0 .. @lines - $length;
die "apply.pl: $wanted: its old lines are in ", scalar(@places), " places of $m->{file}, not in one\n" if @places != 1;
my ($indent) = $lines[$places[0]] =~ /^(\s*)/;
splice @lines, $places[0], $length, map { "$indent$_\n" } @{$m->{new}};
open my $out, '>', $path or die "apply.pl: $path: $!\n";
print $out @lines;
close $out or die "apply.pl: $path: $!\n";
