# launch.pl FILE - prints a preprocessed source with the parts of CUDA C++ that are not C++ rewritten. Lines keep their numbers.
#   kernel<T><<<grid, block, ...>>>(arguments)  ->  emulator::launch("kernel<T>", here(), grid, block, ...)(kernel<T>, arguments)
#   extern __shared__ T name[];                 ->  T* name = the block's dynamic shared memory
#   __shared__ T a[N], b;                       ->  T (&a)[N] = the block's own copy, and the same for b
# emulator.h does everything else.
use strict;
use warnings;
undef $/;
my $source = <>;

my $balanced = qr/(\((?:[^()]++|(?-1))*\))/; # round brackets and all between

# Splits at commas that are outside all brackets.
sub split_list {
    my ($depth, @parts) = (0, "");
    for my $token ($_[0] =~ /->|./gs) {
        if ($token eq "," && !$depth) { push @parts, ""; next }
        $depth++ if $token =~ /^[(\[{<]$/;
        $depth-- if $token =~ /^[)\]}>]$/;
        $parts[-1] .= $token;
    }
    return @parts;
}
sub newlines { return "\n" x ($_[0] =~ tr/\n//) }

sub shared_variables {
    my ($declaration) = @_;
    my ($first, @others) = split_list($declaration);
    my ($type, $name) = $first =~ /^(.*?)\b(\w+\s*(?:\[.*)?)$/s or die "launch.pl: cannot read '__shared__ $declaration'\n";
    my $result = "";
    my $alignment = "1";
    $alignment = "$1" if $type =~ s/(?:__attribute__\s*\(\(\s*aligned\s*|alignas\s*)$balanced\s*(?:\)\s*\))?//;
    for my $declarator ($name, @others) {
        my ($variable, $array) = $declarator =~ /^\s*(\**\w+)\s*(.*?)\s*$/s or die "launch.pl: cannot read '__shared__ $declaration'\n";
        my $stars = $variable =~ s/^\*+// ? $& : "";
        $result .= "using ${variable}_shared_type = $type$stars$array; static const char ${variable}_shared_key = 0; " .
            "auto& $variable = emulator::shared_variable<${variable}_shared_type, $alignment>(&${variable}_shared_key);";
    }
    return $result;
}
sub launch {
    my ($kernel, $configuration, $arguments) = @_;
    (my $name = $kernel) =~ s/\s+/ /g;
    $name =~ s/(["\\])/\\$1/g;
    $arguments =~ s/\b__null\b/nullptr/g; # a pointer of any type
    my $more = $arguments =~ /\S/ ? ", $arguments" : newlines($arguments);
    return "emulator::launch(\"$name\", emulator::here(), $configuration)($kernel$more)";
}

my $template = qr/(<(?:[^<>;{}()]++|\((?:[^()]++)*\)|(?-1))*>)/;
$source =~ s/\bextern\s+__shared__\s+([^;]*?)(\w+)\s*\[\s*\]\s*;/"$1* $2 = static_cast<$1*>(emulator::dynamic_shared(alignof($1), emulator::here()));"/ges;
$source =~ s/__shared__\s+([^;]*);/shared_variables($1)/ges;
$source =~ s/((?:\w+\s*::\s*)*\w+\s*$template?)\s*<<\s*<(.*?)>>\s*>\s*$balanced/launch($1, $3, substr($4, 1, -1))/ges;
print $source;
