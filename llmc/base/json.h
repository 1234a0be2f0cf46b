/* json.h - numbers and texts as JSON, which has no NaN and no text that is not UTF-8. */
#ifndef LLMC_JSON_H
#define LLMC_JSON_H
#include "common.h"
#include <jansson.h>

static inline json_t* json_number(double x) { return isfinite(x) ? json_real(x) : json_null(); }

// JSON is UTF-8; a text that is not gets a ? for each byte beyond ASCII.
static inline json_t* json_text(const char* text) {
    json_t* j = json_string(text);
    if (j) return j;
    char* ascii = xstrdup(text);
    for (char* c = ascii; *c; c++) if ((unsigned char)*c >= 0x80) *c = '?';
    j = json_string(ascii);
    free(ascii);
    return j;
}
#endif
