"""launch.py FILE [N] - prints a preprocessed source with the parts of CUDA C++ that are not C++ rewritten. Lines keep their
numbers.
  kernel<T><<<grid, block, ...>>>(arguments)  ->  emulator::launch("kernel<T>", here(), grid, block, ...)(kernel<T>, arguments)
  extern __shared__ T name[];                 ->  T* name = the block's dynamic shared memory
  __shared__ T a[N], b;                       ->  T (&a)[N] = the block's own copy, and the same for b
  #pragma unroll                              ->  #pragma GCC unroll N
emulator.h does everything else."""
import re, sys
from pathlib import Path


def closing(text, at):
    """Where the bracket at `at` is closed."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def split_list(text):
    """Splits at commas that are outside all brackets."""
    depth, parts = 0, [""]
    for token in re.findall("->|.", text, re.S):
        if token == "," and not depth:
            parts.append("")
            continue
        depth += (token in "([{<") - (token in ")]}>")
        parts[-1] += token
    return parts


def shared_variables(match):
    declaration = match[1]
    first, *others = split_list(declaration)
    named = re.fullmatch(r"(.*?)\b(\w+\s*(?:\[.*)?)", first, re.S)
    variables = [re.fullmatch(r"\s*(\**)(\w+)\s*(.*?)\s*", name, re.S) for name in [named[2], *others]] if named else [None]
    if None in variables:
        sys.exit(f"launch.py: cannot read '__shared__ {declaration}'")
    type, alignment = named[1], "1"
    if aligned := re.search(r"(?:__attribute__\s*\(\(\s*aligned\s*|alignas\s*)\(", type):
        end = closing(type, aligned.end() - 1) + 1
        alignment = type[aligned.end() - 1:end]
        type = type[:aligned.start()] + re.sub(r"^\s*(?:\)\s*\))?", "", type[end:])
    return "".join(f"using {name}_shared_type = {type}{stars}{array}; static const char {name}_shared_key = 0; "
                   f"auto& {name} = emulator::shared_variable<{name}_shared_type, {alignment}>(&{name}_shared_key);"
                   for stars, name, array in (variable.groups() for variable in variables))


def dynamic_shared(match):
    type, name = match.groups()
    return f"{type}* {name} = static_cast<{type}*>(emulator::dynamic_shared(alignof({type}), emulator::here()));"


def template_begin(text, end):
    """Where the template's arguments that end before `end` begin."""
    depth = 0
    for i in range(end - 1, -1, -1):
        depth += (text[i] == ">") - (text[i] == "<")
        if depth == 0:
            return i
    return end


def kernel_begin(text, end):
    """Where a kernel's name that ends before `end` begins."""
    while text[end - 1].isspace():
        end -= 1
    if text[end - 1] == ">":
        end = template_begin(text, end)
    name = re.search(r"(?:\w+\s*::\s*)*\w+\s*$", text[max(0, end - 300):end])
    return end - len(name[0])


def launches(source):
    pieces, done = [], 0
    for match in re.finditer(r"<<\s*<(.*?)>>\s*>\s*(?=\()", source, re.S):
        begin, end = kernel_begin(source, match.start()), closing(source, match.end())
        kernel, arguments = source[begin:match.start()].rstrip(), source[match.end() + 1:end]
        name = re.sub(r'(["\\])', r"\\\1", re.sub(r"\s+", " ", kernel))
        arguments = re.sub(r"\b__null\b", "nullptr", arguments)  # a pointer of any type
        more = f", {arguments}" if arguments.strip() else "\n" * arguments.count("\n")
        pieces += [source[done:begin], f'emulator::launch("{name}", emulator::here(), {match[1]})({kernel}{more})']
        done = end + 1
    return "".join(pieces) + source[done:]


source = Path(sys.argv[1]).read_text()
source = re.sub(r"\bextern\s+__shared__\s+([^;]*?)(\w+)\s*\[\s*\]\s*;", dynamic_shared, source)
if sys.argv[2:]:
    source = re.sub(r"#pragma unroll(?! \d)", f"#pragma GCC unroll {sys.argv[2]}", source)
source = re.sub(r"__shared__\s+([^;]*);", shared_variables, source)
sys.stdout.write(launches(source))
