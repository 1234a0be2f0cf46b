/*
options.h - one table makes both the parser and --help, so neither can lie about the other.

A program makes an options_table(), appends its options with option_int() and the like, and calls options_parse(). Unknown options, bad
numbers and values out of range are errors that name the option and the allowed range. Values may be given as --name VALUE or
--name=VALUE; --no-name turns a switch off. (The options that all stages have are in model/training_options.h.)
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
    bool given;          // on the command line
} OptionSpec;

#define MAX_OPTIONS 80
typedef struct {
    const char* program; // "train_gpt2_single"
    const char* purpose; // one line for --help
    OptionSpec specs[MAX_OPTIONS];
    int count;
    const char* operands_form;       // what --help calls the arguments that are not options: "IN OUT"; NULL: there are none
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

static inline void options_add(OptionTable* t, const char* name, OptionKind kind, void* value, const char* form, double low, double high,
                               const char* help) {
    require(t->count < MAX_OPTIONS, "the option table is full (%d)", MAX_OPTIONS);
    OptionSpec s = { name, 0, kind, value, form, low, high, help, false };
    t->specs[t->count++] = s;
}
static inline void option_text(OptionTable* t, const char* name, const char** value, const char* form, const char* help) {
    options_add(t, name, OPTION_TEXT, value, form, 0, 0, help);
}
static inline void option_int(OptionTable* t, const char* name, long long* value, double low, double high, const char* help) {
    options_add(t, name, OPTION_INT, value, "N", low, high, help);
}
static inline void option_float(OptionTable* t, const char* name, double* value, double low, double high, const char* help) {
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

static inline void options_help(const OptionTable* t) {
    printf("%s: %s\n\nusage: %s [options]%s%s\n\n", t->program, t->purpose, t->program,
           t->operands_form ? " " : "", t->operands_form ? t->operands_form : "");
    for (int i = 0; i < t->count; i++) {
        const OptionSpec* s = &t->specs[i];
        char left[80], value[128], letter[8] = "    ";
        option_format(s, value, sizeof value);
        if (s->letter) snprintf(letter, sizeof letter, "-%c, ", s->letter);
        snprintf(left, sizeof left, "%s--%s %s", letter, s->name, s->form);
        const char* quote = s->kind == OPTION_TEXT ? "'" : "";
        printf("  %-46s%s%s  [%s%s%s]\n", left, strlen(left) > 45 ? "\n                                                " : "", s->help, quote, value, quote);
    }
    printf("  -h, --help                                    print this and exit\n\n"
           "What is [on] or [off] is a switch: --NAME turns it on, --no-NAME off.\n");
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
        require((double)v >= s->low && (double)v <= s->high, "--%s must be between %.0f and %.0f, not %lld", s->name, s->low, s->high, v);
        *(long long*)s->value = v;
    }
    if (s->kind == OPTION_FLOAT) {
        double v = strtod(text, &end);
        require(*text != '\0' && *end == '\0' && !isspace((unsigned char)*text), "--%s wants a number, not '%s'", s->name, text);
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

// Returns the option that an argument names in its first `length` characters, or NULL. *off: by --no-NAME, as a switch may be.
static inline OptionSpec* option_find(OptionTable* t, const char* argument, size_t length, bool* off) {
    for (int i = 0; i < t->count; i++) {
        OptionSpec* s = &t->specs[i];
        size_t n = strlen(s->name);
        bool is_long = length == n + 2 && strncmp(argument, "--", 2) == 0 && strncmp(argument + 2, s->name, n) == 0;
        bool is_short = length == 2 && argument[0] == '-' && s->letter && argument[1] == s->letter;
        *off = s->kind == OPTION_FLAG && length == n + 5 && strncmp(argument, "--no-", 5) == 0 && strncmp(argument + 5, s->name, n) == 0;
        if (is_long || is_short || *off) return s;
    }
    return NULL;
}

// Fills the values behind the table from the command line. --help prints the table and exits with 0. Options may stand
// before, between and after operands; "--" ends them, "-" is an operand.
static inline void options_parse(OptionTable* t, int argc, char** argv) {
    bool only_operands = false;
    if (t->operands_form) t->operands = (const char**)xcalloc((size_t)argc, sizeof(char*));
    for (int i = 1; i < argc; i++) {
        const char* a = argv[i];
        if (!only_operands && (strcmp(a, "--help") == 0 || strcmp(a, "-h") == 0)) { options_help(t); exit(EXIT_SUCCESS); }
        if (t->operands_form && strcmp(a, "--") == 0 && !only_operands) { only_operands = true; continue; }
        if (t->operands_form && (only_operands || a[0] != '-' || a[1] == '\0')) { t->operands[t->operand_count++] = a; continue; }
        size_t length = strcspn(a, "=");
        bool off = false;
        OptionSpec* s = option_find(t, a, length, &off);
        require(s != NULL && !only_operands, "unknown option '%.*s'; --help lists them all", (int)length, a);
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
    die("there is no option --%s", name);
}
#endif
