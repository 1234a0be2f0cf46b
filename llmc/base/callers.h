/*
callers.h - which functions call: a stack is taken as addresses, which costs a microsecond, and its names are found
later, in the line tables of this program (make compiles with -g1) by addr2line of the binutils. It knows functions that
the compiler has inlined, as nearly all of ours are.
*/
#ifndef LLMC_CALLERS_H
#define LLMC_CALLERS_H
#include "common.h"
#include <execinfo.h>
#include <link.h>

#define CALLERS 12
typedef struct { void* at[CALLERS]; } Callers; // return addresses, the innermost first; NULL behind the last

static inline void callers_take(Callers* c) {
    memset(c, 0, sizeof *c);
    backtrace(c->at, CALLERS);
}

// The names of some addresses.
typedef struct {
    void** at;   // (n) owned
    char** text; // (n) lines "FUNCTION\nFILE:LINE\n", the innermost first, owned; NULL: not known
    int n;
} CallerNames;

static inline int caller_names_find(const CallerNames* names, void* at) {
    int i = 0;
    while (i < names->n && names->at[i] != at) i++;
    return i;
}
static inline void caller_names_add(CallerNames* names, const Callers* c) {
    for (int i = 0; i < CALLERS && c->at[i]; i++) {
        if (caller_names_find(names, c->at[i]) < names->n) continue;
        names->at = grown_array(void*, names->at, names->n);
        names->at[names->n++] = c->at[i];
    }
}
static inline void caller_names_free(CallerNames* names) {
    for (int i = 0; i < names->n && names->text; i++) free(names->text[i]);
    free(names->at);
    free(names->text);
}

// For dl_iterate_phdr, which names the program itself first: its distance from the address to which it was linked.
static inline int callers_shift(struct dl_phdr_info* program, size_t size, void* shift) {
    (void)size;
    *(uintptr_t*)shift = (uintptr_t)program->dlpi_addr;
    return 1;
}

// Finds the names. Returns false if there is no addr2line.
static inline bool caller_names_read(CallerNames* names) {
    char *command, *line = NULL;
    size_t room = 0, length;
    uintptr_t shift = 0;
    int i = -1;
    dl_iterate_phdr(callers_shift, &shift);
    FILE* words = open_memstream(&command, &length);
    fprintf(words, "addr2line -e /proc/%d/exe -f -i -a -C 2>/dev/null", (int)getpid());
    for (int k = 0; k < names->n; k++) // the call lies before the address to which it returns
        fprintf(words, " 0x%llx", (unsigned long long)((uintptr_t)names->at[k] - shift - 1));
    fclose(words);
    FILE* f = names->n > 0 ? popen(command, "r") : NULL;
    free(command);
    if (f == NULL) return names->n == 0;
    names->text = new_array(char*, names->n);
    while (getline(&line, &room, f) > 0) {
        if (strncmp(line, "0x", 2) == 0) { i++; continue; } // the next address
        if (i < 0 || i >= names->n) continue;
        char* text = format_string("%s%s", names->text[i] ? names->text[i] : "", line);
        free(names->text[i]);
        names->text[i] = text;
    }
    free(line);
    return pclose(f) == 0;
}

// A function of a stack, and the line on which it calls the one before it. is_inside: it belongs to llmc/comm/, or is
// callers_take.
typedef struct { char function[48], file[48]; int line; bool in_header, is_inside; } Caller;

// Sets *caller from "FUNCTION\nFILE:LINE\n". Returns what follows, or NULL if text is not that.
static inline const char* caller_parse(const char* text, Caller* caller) {
    char path[1024] = "";
    memset(caller, 0, sizeof *caller);
    if (sscanf(text, "%47[^(\n]", caller->function) != 1 || strchr(text, '\n') == NULL) return NULL;
    const char* next = strchr(text, '\n') + 1;
    if (sscanf(next, "%1023[^\n]", path) != 1 || strchr(next, '\n') == NULL) return NULL;
    char* colon = strrchr(path, ':');
    if (colon) { caller->line = atoi(colon + 1); *colon = '\0'; }
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path, *dot = strrchr(name, '.');
    snprintf(caller->file, sizeof caller->file, "%.47s", name);
    caller->in_header = dot && (strcmp(dot, ".h") == 0 || strcmp(dot, ".cuh") == 0);
    bool in_comm = caller->in_header && slash && slash - path >= 5 && strncmp(slash - 5, "/comm", 5) == 0;
    caller->is_inside = in_comm || strcmp(name, "callers.h") == 0;
    return strchr(next, '\n') + 1;
}

// Returns the stack (up to `most`) of a call into llmc/comm/: from the function that made it, to main.
static inline int callers_stack(const CallerNames* names, const Callers* c, Caller* stack, int most) {
    int n = 0;
    for (int i = 0; i < CALLERS && c->at[i]; i++) {
        int at = caller_names_find(names, c->at[i]);
        const char* text = at < names->n && names->text && names->text[at] ? names->text[at] : "";
        while (n < most && (text = caller_parse(text, &stack[n])) != NULL) {
            bool is_part = n > 0 && strcmp(stack[n].function, stack[n - 1].function) == 0; // compiled apart
            if (stack[n].is_inside || stack[n].function[0] == '?' || is_part) continue;
            if (strcmp(stack[n++].function, "main") == 0) return n;
        }
    }
    return n;
}
#endif
