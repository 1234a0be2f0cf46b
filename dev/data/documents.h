/*
documents.h - reads the documents in text files, one after another, for the programs in this folder.

A document is a whole file, the lines between two separator lines, or one field of a line of JSON; or two fields of it, a
prompt and the response to it, one after the other. Empty ones are skipped. A document is a string of any bytes: nothing here decodes or changes them.
*/
#ifndef DOCUMENTS_H
#define DOCUMENTS_H
#include "../../llmc/base/common.h"
#include "../../llmc/base/folder.h"
#include "../../llmc/base/options.h"
#include <jansson.h>

enum { SPLIT_FILE, SPLIT_LINE, SPLIT_JSONL };

typedef struct {
    int split;             // SPLIT_*
    const char* separator; // SPLIT_LINE: the line, without its end
    const char* field;     // SPLIT_JSONL: the name of the field
    const char *prompt_field, *response_field; // or of these two; "": there is one
    const char** paths;    // (num_paths) files or pipes, "-" is standard input; the array is owned
    int num_paths;
    int opened;            // paths opened so far
    FILE* file;            // the last one opened; NULL: the next is still to be opened
    size_t line_number;    // in that file
    char* line;            // (line_capacity) owned
    size_t line_capacity;
    char* text;            // (capacity) the current document, its first `length` bytes, owned
    size_t length, capacity;
    size_t prompt;         // of these, the bytes of the prompt
} Documents;

// Room for `needed` elements of `size` bytes each.
static inline void* grow(void* array, size_t needed, size_t* capacity, size_t size) {
    if (needed <= *capacity) return array;
    *capacity = size_max(size_max(16, needed), 2 * *capacity);
    return xrealloc(array, *capacity * size);
}

// Reads the command line: options and paths. Adds the options about documents to the table.
static inline Documents documents_parse(OptionTable* table, int argc, char** argv) {
    static Documents d; // static, because the table points into it
    d.separator = "";
    d.field = "text";
    d.prompt_field = d.response_field = "";
    option_choice(table, "split", &d.split, "file|line|jsonl",
                  "a document is a file, lines up to a separator line, or a line of JSON");
    option_text(table, "separator", &d.separator, "TEXT",
                "the line that separates documents with --split line; '': an empty line");
    option_text(table, "field", &d.field, "NAME", "the field that holds the text with --split jsonl");
    option_text(table, "prompt-field", &d.prompt_field, "NAME", "with --split jsonl, the field that holds a prompt, which is read"
                " but does not count in the loss");
    option_text(table, "response-field", &d.response_field, "NAME", "the field that holds the response to it, which does");
    options_operands(table, "FILE...", 1, INT32_MAX);
    options_parse(table, argc, argv);
    bool pairs = d.prompt_field[0] || d.response_field[0];
    bool are_two = d.prompt_field[0] && d.response_field[0] && strcmp(d.prompt_field, d.response_field) != 0;
    require(!pairs || (are_two && d.split == SPLIT_JSONL && !option_given(table, "field")),
            "--prompt-field '%s' and --response-field '%s' must be two fields of lines of JSON: give both, --split jsonl, and"
            " no --field", d.prompt_field, d.response_field);
    d.paths = table->operands;
    d.num_paths = table->operand_count;
    return d;
}

// Opens what has text. Documents are read once, from the first byte to the last, so it may also be a pipe: /dev/stdin,
// <(COMMAND) or a FIFO.
static inline FILE* documents_open(const char* path) {
    FILE* file = fopen(path, "rb");
    require(file != NULL, "cannot open %s: %s", path, open_error(errno));
    struct stat info;
    require(fstat(fileno(file), &info) == 0, "cannot examine %s: %s", path, strerror(errno));
    require(!S_ISDIR(info.st_mode), "%s is a folder; give the files in it", path);
    return file;
}

static inline void document_append(Documents* d, const char* bytes, size_t n) {
    d->text = (char*)grow(d->text, d->length + n, &d->capacity, 1);
    memcpy(d->text + d->length, bytes, n);
    d->length += n;
}

// Each of these reads one document, which may be empty, and returns false at the end of the file.
static inline bool document_read_file(Documents* d) {
    char piece[65536];
    for (size_t n; (n = fread(piece, 1, sizeof piece, d->file)) > 0; ) {
        size_t mark = d->length == 0 ? text_mark(piece, n) : 0;
        document_append(d, piece + mark, n - mark);
    }
    return false;
}

static inline bool document_read_lines(Documents* d) {
    ssize_t n;
    while ((n = getline(&d->line, &d->line_capacity, d->file)) > 0) {
        size_t mark = d->line_number++ == 0 ? text_mark(d->line, (size_t)n) : 0;
        const char* line = d->line + mark;
        size_t separator = strlen(d->separator), length = (size_t)n - mark - (d->line[n - 1] == '\n');
        bool has_cr = length == separator + 1 && line[separator] == '\r'; // as lines end on Windows
        if ((length == separator || has_cr) && memcmp(line, d->separator, separator) == 0) return true;
        document_append(d, line, (size_t)n - mark);
    }
    return false;
}

// Adds the text in a field of a line of JSON; dies if there is none. option: what names the field. Returns its length.
static inline size_t document_append_field(Documents* d, const json_t* object, const char* field, const char* option) {
    const json_t* text = json_object_get(object, field);
    require(json_is_string(text), "line %zu of %s has no text in a field \"%s\"; --%s names another", d->line_number,
            d->paths[d->opened - 1], field, option);
    document_append(d, json_string_value(text), json_string_length(text));
    return json_string_length(text);
}

static inline bool document_read_json(Documents* d) {
    ssize_t n = getline(&d->line, &d->line_capacity, d->file);
    if (n <= 0) return false;
    if (d->line_number++ == 0) memset(d->line, ' ', text_mark(d->line, (size_t)n));
    if (strspn(d->line, " \t\r\n") == (size_t)n) return true;
    const char* path = d->paths[d->opened - 1];
    json_error_t error;
    // Nobody reads the numbers, of which some are larger than any integer.
    size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL;
    json_t* object = json_loadb(d->line, (size_t)n, flags, &error);
    require(object != NULL, "line %zu of %s is not valid JSON: %s; JSON is UTF-8 without halves of surrogate pairs, and has no"
            " NaN or Infinity: in Python, json.dumps(..., allow_nan=False) finds them", d->line_number, path, error.text);
    if (d->prompt_field[0]) {
        d->prompt = document_append_field(d, object, d->prompt_field, "prompt-field");
        size_t response = document_append_field(d, object, d->response_field, "response-field");
        require(response > 0, "line %zu of %s has an empty response in its field \"%s\", which teaches nothing; remove the line",
                d->line_number, path, d->response_field);
    } else document_append_field(d, object, d->field, "field");
    json_decref(object);
    return true;
}

// Puts the next document that is not empty in text and length. Returns false if there are no more.
static inline bool documents_next(Documents* d) {
    do {
        if (d->file == NULL) {
            if (d->opened == d->num_paths) return false;
            const char* path = d->paths[d->opened++];
            d->file = strcmp(path, "-") == 0 ? stdin : documents_open(path);
            d->line_number = 0;
        }
        d->length = d->prompt = 0;
        bool more = d->split == SPLIT_FILE ? document_read_file(d)
                  : d->split == SPLIT_LINE ? document_read_lines(d) : document_read_json(d);
        if (more) continue;
        require(!ferror(d->file), "cannot read %s: %s", d->paths[d->opened - 1], strerror(errno));
        if (d->file != stdin) fclose(d->file);
        d->file = NULL;
    } while (d->length == 0);
    return true;
}

static inline void documents_free(Documents* d) {
    free(d->paths);
    free(d->line);
    free(d->text);
}
#endif
