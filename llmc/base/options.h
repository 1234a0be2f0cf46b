/*
options.h - one table makes both the parser and --help, so neither can lie about the other.

A program makes an options_table(), appends options with option_int(), option_text(), ..., and calls options_parse().
Unknown options, bad numbers and values out of range are errors that name the option and the allowed range. Values may
be given as --name VALUE or --name=VALUE; --no-name turns a switch off. --help shows the options that a program adds
itself before those that it shares with others, which options_group() puts under headings. (model/training_options.h
adds those of all programs.)
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H
#include "common.h"

typedef enum { OPTION_TEXT, OPTION_INT, OPTION_FLOAT, OPTION_CHOICE, OPTION_FLAG } OptionKind;

typedef struct {
    const char* name;    // without the dashes
    char letter;         // one-letter name, 0: none
    OptionKind kind;
    void* value;         // const char** (TEXT), long long* (INT), double* (FLOAT), int* (CHOICE: index; FLAG: 0 or 1)
    const char* form;    // what --help calls the value; for CHOICE its words, separated by |
    double low, high;    // allowed range of numbers
    const char* help;
    int group;           // index into OptionTable.groups
    bool given;          // on the command line
} OptionSpec;

#define MAX_OPTIONS 80
#define MAX_GROUPS 16
typedef struct {
    const char* program; // "train_gpt2_single"
    const char* purpose; // one line for --help
    OptionSpec specs[MAX_OPTIONS];
    int count;
    const char* groups[MAX_GROUPS];  // headings of --help, in its order; groups[0], the program's own options, is NULL
    int group;                       // the group of options added next
    const char* operands_form;       // what --help calls the arguments that are not options: "IN OUT";
                                     // NULL: there are none
    int min_operands, max_operands;
    const char** operands;           // (operand_count) those of the command line, after options_parse; owned
    int operand_count;
} OptionTable;

static inline OptionTable options_table(const char* program, const char* purpose) {
    OptionTable t;
    memset(&t, 0, sizeof t);
    t.program = program;
    t.purpose = purpose;
    return t;
}

// The command line also takes arguments that are not options: from `least` to `most` of them.
static inline void options_operands(OptionTable* t, const char* form, int min, int max) {
    t->operands_form = form;
    t->min_operands = min;
    t->max_operands = max;
}

// Puts the options added from now on under this heading of --help. NULL: they are the program's own. Headings appear in
// the order in which they were first named, even if their options are added later.
static inline void options_group(OptionTable* t, const char* heading) {
    int g = 0;
    while (heading && ++g < MAX_GROUPS && t->groups[g] && strcmp(t->groups[g], heading) != 0) { }
    invariant(g < MAX_GROUPS, "the option table has more than %d groups", MAX_GROUPS - 1);
    t->groups[g] = heading;
    t->group = g;
}

static inline void options_add(OptionTable* t, const char* name, OptionKind kind, void* value, const char* form,
                               double low, double high, const char* help) {
    invariant(t->count < MAX_OPTIONS, "the option table is full (%d)", MAX_OPTIONS);
    OptionSpec s = { name, 0, kind, value, form, low, high, help, t->group, false };
    t->specs[t->count++] = s;
}
static inline void option_text(OptionTable* t, const char* name, const char** value, const char* form,
                               const char* help) {
    options_add(t, name, OPTION_TEXT, value, form, 0, 0, help);
}
static inline void option_int(OptionTable* t, const char* name, long long* value, double low, double high,
                              const char* help) {
    options_add(t, name, OPTION_INT, value, "N", low, high, help);
}
static inline void option_float(OptionTable* t, const char* name, double* value, double low, double high,
                                const char* help) {
    options_add(t, name, OPTION_FLOAT, value, "X", low, high, help);
}
static inline void option_choice(OptionTable* t, const char* name, int* value, const char* words, const char* help) {
    options_add(t, name, OPTION_CHOICE, value, words, 0, 0, help);
}
static inline void option_flag(OptionTable* t, const char* name, int* value, const char* help) {
    options_add(t, name, OPTION_FLAG, value, "", 0, 1, help);
}
// Gives the option added last a one-letter name.
static inline void option_letter(OptionTable* t, char letter) { t->specs[t->count - 1].letter = letter; }

// The value of option s as text, as --help and the run record show it.
static inline void option_format(const OptionSpec* s, char* out, size_t size) {
    if (s->kind == OPTION_TEXT) snprintf(out, size, "%s", *(const char**)s->value);
    if (s->kind == OPTION_INT) snprintf(out, size, "%lld", *(long long*)s->value);
    if (s->kind == OPTION_FLOAT) snprintf(out, size, "%g", *(double*)s->value);
    if (s->kind == OPTION_FLAG) snprintf(out, size, "%s", *(int*)s->value ? "on" : "off");
    if (s->kind != OPTION_CHOICE) return;
    const char* word = s->form;
    for (int i = *(int*)s->value; i > 0; i--) word = strchr(word, '|') + 1;
    snprintf(out, size, "%.*s", (int)strcspn(word, "|"), word);
}

enum { HELP_WIDTH = 80, HELP_COLUMN = 28 }; // columns of a line, and in front of an option's help

// Prints words in lines of at most HELP_WIDTH columns. The first line continues at column `at`;
// later ones are indented.
static inline void print_wrapped(const char* text, int at, int indent) {
    const char* gap = "";
    text += strspn(text, " ");
    for (int n; (n = (int)strcspn(text, " ")) > 0; text += n, text += strspn(text, " ")) {
        if (*gap && at + 1 + n > HELP_WIDTH) {
            at = printf("\n%*s", indent, "") - 1;
            gap = "";
        }
        at += printf("%s%.*s", gap, n, text);
        gap = " ";
    }
    printf("\n");
}

static inline void option_help(const OptionSpec* s) {
    char value[128], text[1024], letter[8] = "";
    const char* quote = s->kind == OPTION_TEXT ? "'" : "";
    option_format(s, value, sizeof value);
    if (s->letter) snprintf(letter, sizeof letter, "-%c, ", s->letter);
    int at = printf("  %s--%s %s", letter, s->name, s->form);
    if (at > HELP_COLUMN - 2) {
        printf("\n");
        at = 0;
    }
    printf("%*s", HELP_COLUMN - at, "");
    snprintf(text, sizeof text, "%s [%s%s%s]", s->help, quote, value, quote);
    print_wrapped(text, HELP_COLUMN, HELP_COLUMN);
}

// Prints a group with its heading, if it has options. A table without groups needs no heading.
static inline void options_help_group(const OptionTable* t, int group) {
    bool any = false;
    for (int i = 0; i < t->count; i++) {
        if (t->specs[i].group != group) continue;
        if (!any && group > 0) printf("%s:\n", t->groups[group]);
        if (!any && group == 0 && t->groups[1]) printf("options of %s:\n", t->program);
        option_help(&t->specs[i]);
        any = true;
    }
    if (any) printf("\n");
}

static inline void options_help(const OptionTable* t) {
    print_wrapped(t->purpose, printf("%s: ", t->program), 4);
    printf("\nusage: %s [options]%s%s\n\n", t->program, t->operands_form ? " " : "",
           t->operands_form ? t->operands_form : "");
    for (int group = 0; group == 0 || (group < MAX_GROUPS && t->groups[group]); group++) options_help_group(t, group);
    printf("  -h, --help%*sprint this and exit\n\nAn option with the default [on] or [off] is a switch: --NAME turns "
           "it on,\n"
           "--no-NAME turns it off.\n",
           HELP_COLUMN - 12, "");
}

static inline void option_set(const OptionSpec* s, const char* text) {
    char* end;
    errno = 0;
    if (s->kind == OPTION_TEXT) *(const char**)s->value = text;
    if (s->kind == OPTION_FLAG) *(int*)s->value = strcmp(text, "on") == 0;
    if (s->kind == OPTION_INT) {
        long long v = strtoll(text, &end, 10);
        require(*text != '\0' && *end == '\0' && errno == 0 && !isspace((unsigned char)*text),
                "--%s wants a whole number, not '%s'", s->name, text);
        require((double)v >= s->low && (double)v <= s->high, "--%s must be between %.0f and %.0f, not %lld", s->name,
                s->low, s->high, v);
        *(long long*)s->value = v;
    }
    if (s->kind == OPTION_FLOAT) {
        double v = strtod(text, &end);
        require(*text != '\0' && *end == '\0' && !isspace((unsigned char)*text), "--%s wants a number, not '%s'",
                s->name, text);
        require(v >= s->low && v <= s->high, "--%s must be between %g and %g, not %s", s->name, s->low, s->high, text);
        *(double*)s->value = v;
    }
    if (s->kind == OPTION_CHOICE) {
        int index = 0;
        for (const char* word = s->form; ; index++) {
            size_t n = strcspn(word, "|");
            if (strlen(text) == n && strncmp(word, text, n) == 0) break;
            require(word[n] == '|', "--%s must be one of %s, not '%s'", s->name, s->form, text);
            word += n + 1;
        }
        *(int*)s->value = index;
    }
}

// Returns the option that an argument names in its first `length` characters, or NULL.
// *off: by --no-NAME, as a switch may be.
static inline OptionSpec* option_find(OptionTable* t, const char* argument, size_t length, bool* off) {
    for (int i = 0; i < t->count; i++) {
        OptionSpec* s = &t->specs[i];
        size_t n = strlen(s->name);
        bool is_long = length == n + 2 && strncmp(argument, "--", 2) == 0 && strncmp(argument + 2, s->name, n) == 0;
        bool is_short = length == 2 && argument[0] == '-' && s->letter && argument[1] == s->letter;
        *off = s->kind == OPTION_FLAG && length == n + 5 && strncmp(argument, "--no-", 5) == 0
               && strncmp(argument + 5, s->name, n) == 0;
        if (is_long || is_short || *off) return s;
    }
    return NULL;
}

// Returns how few letters one can insert, delete, replace or swap with a neighbour to turn the first m of a into b.
static inline size_t edit_distance(const char* a, size_t m, const char* b) {
    enum { MOST = 40 };
    size_t n = strlen(b), d[MOST + 1][MOST + 1]; // d[i][j]: of the first i letters of a and the first j of b
    if (m > MOST || n > MOST) return SIZE_MAX;
    for (size_t i = 0; i <= m; i++)
        for (size_t j = 0; j <= n; j++) {
            d[i][j] = i + j;
            if (i == 0 || j == 0) continue;
            d[i][j] = size_min(d[i-1][j-1] + (a[i-1] != b[j-1]), size_min(d[i-1][j], d[i][j-1]) + 1);
            bool swapped = i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1];
            if (swapped) d[i][j] = size_min(d[i][j], d[i-2][j-2] + 1);
        }
    return d[m][n];
}

// Asks in `out` whether an unknown option of `length` characters stands for one that starts with it, or that differs
// from it in no more than about a third of the letters. Writes "" if there is none.
static inline void option_suggest(const OptionTable* t, const char* unknown, size_t length, char* out, size_t size) {
    size_t dashes = strspn(unknown, "-"), n = length - dashes, too_far = (n + 1) / 3 + 1;
    out[0] = '\0';
    for (int i = 0; i < t->count; i++) {
        for (int off = 0; off <= (t->specs[i].kind == OPTION_FLAG); off++) {
            char name[64];
            snprintf(name, sizeof name, "%s%s", off ? "no-" : "", t->specs[i].name);
            bool starts = n >= 3 && strncmp(name, unknown + dashes, n) == 0;
            size_t distance = starts ? 1 : edit_distance(unknown + dashes, n, name);
            if (distance >= too_far) continue;
            too_far = distance;
            snprintf(out, size, "did you mean --%s? ", name);
        }
    }
}

// Fills the values behind the table from the command line. --help prints the table and exits with 0. Options may stand
// before, between and after operands; "--" ends them, "-" is an operand.
static inline void options_parse(OptionTable* t, int argc, char** argv) {
    bool only_operands = false;
    if (t->operands_form) t->operands = new_array(const char*, argc);
    for (int i = 1; i < argc; i++) {
        const char* a = argv[i];
        if (!only_operands && (strcmp(a, "--help") == 0 || strcmp(a, "-h") == 0)) {
            options_help(t);
            exit(EXIT_SUCCESS);
        }
        if (t->operands_form && strcmp(a, "--") == 0 && !only_operands) { only_operands = true; continue; }
        if (t->operands_form && (only_operands || a[0] != '-' || a[1] == '\0')) {
            t->operands[t->operand_count++] = a;
            continue;
        }
        size_t length = strcspn(a, "=");
        bool off = false;
        OptionSpec* s = option_find(t, a, length, &off);
        char suggestion[96] = "";
        if (s == NULL) option_suggest(t, a, length, suggestion, sizeof suggestion);
        require(s != NULL, "unknown option '%.*s'; %s--help lists them all", (int)length, a, suggestion);
        s->given = true;
        if (s->kind == OPTION_FLAG) {
            require(a[length] == '\0', "--%s is a switch and takes no value; --no-%s turns it off", s->name, s->name);
            option_set(s, off ? "off" : "on");
        } else if (a[length] == '=') {
            option_set(s, a + length + 1);
        } else {
            require(i + 1 < argc, "--%s needs a value: %s", s->name, s->form);
            option_set(s, argv[++i]);
        }
    }
    require(t->operand_count >= t->min_operands && t->operand_count <= t->max_operands,
            "usage: %s [options] %s; --help says more", t->program, t->operands_form);
}

// Returns true if the command line named --NAME.
static inline bool option_given(OptionTable* t, const char* name) {
    for (int i = 0; i < t->count; i++) if (strcmp(t->specs[i].name, name) == 0) return t->specs[i].given;
    die_here("there is no option --%s", name);
}
#endif
