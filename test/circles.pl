#!/usr/bin/perl
# circles.pl [FOLDER] - make check-folders: checks that llmc/ can be read from its bottom to its top.
#
# It looks at every .h and .cuh below FOLDER (llmc) and prints each
#   include circle   headers that include one another
#   use circle       headers that use functions, types, macros or variables defined in one another, whoever includes what
#   upward arrow     a header that includes or uses one of a folder that comes later in the order below
# with the symbols that make it. Status 1 if there is any.
#
# The home of a symbol is where it is declared: a prototype counts, and a type's forward declaration, so that a header which
# implements what another one documents makes no circle. Where several headers declare a symbol, as one for each device
# does, those in the user's own folder are meant, or else all of them.
use strict;
use warnings;
use File::Find;

my $folder = $ARGV[0] // 'llmc';
my @order = qw(base model device watch comm data save parallel run);
my %level = map { $order[$_] => $_ } 0 .. $#order;
my %apart = map { $_ => 1 } 'model device', 'device model', 'data comm'; # neither needs the other, though one comes first

# ---- reading headers ----

# The code of a header without comments, strings, includes and line continuations, and the paths that it includes.
sub read_code {
    my ($path) = @_;
    open my $in, '<', "$folder/$path" or die "circles.pl: $folder/$path: $!\n";
    my $text = join '', <$in>;
    $text =~ s{/\*.*?\*/|//[^\n]*|("(?:\\.|[^"\\\n])*")|'(?:\\.|[^'\\\n])+'}{ defined $1 ? $1 : ' ' }gse;
    my @includes = map { resolved($path, $_) } $text =~ /^[ \t]*#[ \t]*include[ \t]+"([^"]+)"/mg;
    $text =~ s/^[ \t]*#[ \t]*include[^\n]*//mg;
    $text =~ s/"(?:\\.|[^"\\\n])*"/""/g;
    $text =~ s/\\\n/ /g;
    return ($text, @includes);
}

# The path below FOLDER that a header means by an include.
sub resolved {
    my ($from, $include) = @_;
    (my $path = $from) =~ s{[^/]*$}{$include};
    1 while $path =~ s{(^|/)(?!\.\./)[^/]+/\.\./}{$1} || $path =~ s{(^|/)\./}{$1};
    return $path;
}

# Cuts code without preprocessor lines into what stands at the top level, bodies of functions removed: [text, has a body].
sub top_level {
    my ($code) = @_;
    my @found;
    my ($depth, $parentheses, $text, $in_body) = (0, 0, '', 0);
    $code =~ s/(extern\s*""|namespace\s*\w*)\s*\{/ /g;
    for my $token ($code =~ /[{}();]|[^{}();]+/g) {
        $in_body = 1 if $token eq '{' && $depth == 0 && $text =~ /^[^=]*\)\s*$/ && $text !~ /^\s*(typedef|enum|union)\b/;
        $depth++ if $token eq '{';
        $depth-- if $token eq '}' && $depth > 0;
        $parentheses += $token eq '(' ? 1 : $token eq ')' ? -1 : 0 if $depth == 0;
        $token =~ s/=[^,]*//g if $parentheses > 0 && $depth == 0; # a parameter's default value
        $text .= $token unless $in_body;
        if ($depth == 0 && (($token eq ';' && $parentheses == 0) || ($token eq '}' && $in_body))) {
            push @found, [$text, $in_body];
            ($text, $in_body, $parentheses) = ('', 0, 0);
        }
    }
    return @found;
}

# The symbols that a piece of the top level declares: [name, kind, only announced].
sub declared {
    my ($text, $has_body) = @_;
    $text =~ s/__attribute__\s*\(\(.*?\)\)|__launch_bounds__\s*\([^()]*\)|\btemplate\s*<[^{}()]*?>(?=\s*[\w_])/ /gs;
    $text =~ s/^[\s;}]+//;
    my @symbols;
    if ($text =~ /^(?:typedef\s+|static\s+|const\s+)*enum\b[^{;]*\{(.*?)\}/s) {
        push @symbols, map { /^\s*(\w+)/ ? [$1, 'constant', 0] : () } split /,/, $1;
    }
    my $is_typedef = $text =~ /^typedef\b/;
    my $forward = $text =~ /^(?:typedef\s+)?(?:struct|union)\s+(\w+)\s*\w*\s*;/;
    push @symbols, [$1, 'type', 0] if $text =~ /^(?:static\s+)?(?:struct|union|enum(?:\s+class)?|class)\s+(\w+)[^{;()=]*\{/;
    push @symbols, [$1, 'type', 0] if $text =~ /^using\s+(\w+)\s*=/;
    (my $flat = $text) =~ s/\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}/ /gs;
    my $array = qr/(?:\[[^\]]*\]\s*)*/;
    my $pointer = qr/^[^=(]*\(\s*\*\s*(?:const\s+)?(\w+)/; # to a function
    if ($is_typedef) {
        my $is_found = $flat =~ $pointer || $flat =~ /(\w+)\s*(?:\([^()]*\)\s*|$array);\s*$/;
        push @symbols, [$1, 'type', $forward ? 1 : 0] if $is_found;
    } elsif ($flat =~ /^(?:using|static_assert|friend|struct\s+\w+\s*;)/) {
        # declares no further name
    } elsif ($flat =~ $pointer) { push @symbols, [$1, 'variable', 0] }
    elsif ($flat =~ /^\w[^=]*?\b(\w+)\s*\(/) { push @symbols, [$1, 'function', $has_body ? 0 : 1] }
    else {
        $flat =~ s/=[^,;]*//g;
        push @symbols, map { [$_, 'variable', 0] } $flat =~ /[\s*](\w+)\s*$array(?=[,;])/g;
    }
    return @symbols;
}

my (%code, %includes, %kind, %homes, %announced);
# Reads a header into these: its code, what it includes, and {symbol}{header} = 1 of what it declares.
sub read_header {
    my ($path) = @_;
    ($code{$path}, my @paths) = read_code($path);
    $includes{$path} = { map { $_ => 1 } @paths };
    my $guard = $code{$path} =~ /^\s*#ifndef\s+(\w+)\s*\n\s*#define\s+(\w+)[ \t]*\n/ && $1 eq $2 ? $1 : '';
    for my $name ($code{$path} =~ /^[ \t]*#[ \t]*define[ \t]+(\w+)/mg) {
        next if $name eq $guard || $code{$path} =~ /^[ \t]*#[ \t]*undef[ \t]+$name\b/m;
        $kind{$name} = 'macro';
        $homes{$name}{$path} = 1;
    }
    (my $plain = $code{$path}) =~ s/^[ \t]*#[^\n]*//mg;
    for my $symbol (map { declared(@$_) } top_level($plain)) {
        my ($name, $kind, $only_announced) = @$symbol;
        next if $name eq 'main';
        $kind{$name} //= $kind;
        if ($only_announced) { $announced{$name}{$path} = 1 } else { $homes{$name}{$path} = 1 }
    }
}

# ---- who uses what ----

# {symbol} = 1 of all words in a header that can mean a symbol.
sub used_words {
    my ($path) = @_;
    my %used;
    my $code = $code{$path};
    while ($code =~ /(?<!\w)([A-Za-z_]\w*)/g) {
        my ($name, $at) = ($1, pos $code);
        next if $used{$name} || !$kind{$name};
        my $before = substr($code, 0, $at - length $name);
        next if $before =~ /(\.|->)\s*\z/;
        if ($kind{$name} eq 'function') { # called, or given away by its name
            my $after = substr($code, $at, 80);
            my $is_value = $name =~ /_/ && $before =~ /([,(=&{?:]|return)\s*\z/ && $after =~ /^\s*[,);}:]/;
            next unless $after =~ /^\s*(<[^;<>(){}]*>\s*)?(<<<|\()/ || $is_value;
        } elsif ($kind{$name} eq 'variable') { # not a member or a local variable of the same name, which is declared here
            next if $before =~ /[,\w]\s*\*+\s*\z/ || ($before =~ /(\w+)\s+\z/ && $1 !~ /^(?:return|sizeof|else|case)$/);
        }
        $used{$name} = 1;
    }
    return keys %used;
}

sub directory { my ($path) = @_; return $path =~ m{^(.*)/} ? $1 : '' }
sub room { my ($path) = @_; return $path =~ m{^([^/]+)/} ? $1 : '' }

# Of the headers that declare a symbol, those that a user of it means.
sub meant_by {
    my ($path, @declaring) = @_;
    return () if grep { $_ eq $path } @declaring;
    my @near = grep { directory($_) eq directory($path) } @declaring;
    return @near if @near;
    my %other = (cpu => 'cuda', cuda => 'cpu'); # two implementations of the same contract
    my $not = directory($path) =~ m{^device/(cpu|cuda)$} ? "device/$other{$1}" : '-';
    return grep { directory($_) ne $not } @declaring;
}

# {user}{home} = [symbols]
sub use_graph {
    my %uses = map { $_ => {} } keys %code;
    for my $path (sort keys %code) {
        for my $name (sort(used_words($path))) {
            my $declaring = $announced{$name} || $homes{$name};
            next if $homes{$name} && $homes{$name}{$path};
            push @{$uses{$path}{$_}}, $name for meant_by($path, sort keys %$declaring);
        }
    }
    return %uses;
}

# ---- circles ----

# The shortest way from one header to another in a graph {from}{to}: a list of headers; empty: there is none.
sub way {
    my ($graph, $from, $to) = @_;
    my @queue = ([$from]);
    my %seen = ($from => 1);
    while (my $way = shift @queue) {
        return @$way if $way->[-1] eq $to;
        push @queue, map { [@$way, $_] } grep { !$seen{$_}++ } sort keys %{$graph->{$way->[-1]}};
    }
    return ();
}

# The shortest circles of a graph: lists of headers. Of circles that share an arrow it returns only the shortest, because
# the others may be gone when that one is.
sub circles {
    my ($graph) = @_;
    my (@circles, %seen, %taken);
    for my $from (sort keys %$graph) {
        for my $to (sort keys %{$graph->{$from}}) {
            my @circle = way($graph, $to, $from) or next;
            pop @circle if @circle > 1 || $to eq $from; # it ends where it began
            @circle = ($from, grep { $_ ne $from } @circle);
            push @circle, shift @circle while (sort @circle)[0] ne $circle[0];
            push @circles, \@circle unless $seen{"@circle"}++;
        }
    }
    my @kept;
    for my $circle (sort { @$a <=> @$b || "@$a" cmp "@$b" } @circles) {
        my @arrows = map { "$circle->[$_ - 1] $circle->[$_]" } 0 .. $#$circle;
        next if grep { $taken{$_} } @arrows;
        $taken{$_} = 1 for @arrows;
        push @kept, $circle;
    }
    return @kept;
}

sub some { my @names = @_; return join(', ', @names > 6 ? (@names[0 .. 5], '... ' . @names . ' in all') : @names) }

my @found;
my $wanted = sub { push @found, substr($File::Find::name, 1 + length $folder) if /\.cuh?$|\.h$/ && -f };
find({ wanted => $wanted, no_chdir => 1 }, $folder);
my @headers = sort @found;
die "circles.pl: there are no headers in $folder\n" unless @headers;
my @faults;
for my $path (@headers) {
    read_header($path);
    push @faults, "no folder of the order: $path" unless defined $level{room($path)};
}
for my $from (@headers) {
    push @faults, map { "no such file: $from includes $_" } grep { !exists $code{$_} } sort keys %{$includes{$from}};
}
for my $circle (circles(\%includes)) { push @faults, 'include circle: ' . join(' -> ', @$circle, $circle->[0]) }
my %uses = use_graph();
for my $circle (circles(\%uses)) {
    my $text = $circle->[0];
    for my $i (1 .. @$circle) {
        my ($from, $to) = ($circle->[$i - 1], $circle->[$i % @$circle]);
        $text .= " -> $to (" . some(@{$uses{$from}{$to}}) . ')';
    }
    push @faults, "use circle: $text";
}
for my $from (@headers) {
    for my $to (sort keys %{{ %{$includes{$from}}, %{$uses{$from}} }}) {
        my ($lower, $upper) = (room($from), room($to));
        next if $lower eq $upper || !defined $level{$lower} || !defined $level{$upper};
        next if $level{$upper} < $level{$lower} && !$apart{"$lower $upper"};
        my $why = $uses{$from}{$to} ? some(@{$uses{$from}{$to}}) : 'only included';
        push @faults, "upward arrow: $from -> $to ($why)";
    }
}
print "$_\n" for @faults;
my $count = @faults == 1 ? "1 fault" : @faults . " faults";
my $verdict = @faults ? $count : "no circles, and all arrows between folders point downward";
print scalar @headers, " headers in $folder: $verdict\n";
exit(@faults ? 1 : 0);
