// PCRE2: a Unicode class as in GPT-2's pre-tokenizer must match "é"; its version, and whether it compiles to machine code.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>

int main(void) {
    int error;
    PCRE2_SIZE where;
    char version[64];
    uint32_t jit = 0;
    pcre2_code* code = pcre2_compile((PCRE2_SPTR)"^\\p{L}+$", PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &error, &where, NULL);
    if (code == NULL) { printf("built without Unicode\n"); return 1; }
    pcre2_match_data* match = pcre2_match_data_create_from_pattern(code, NULL);
    if (pcre2_match(code, (PCRE2_SPTR)"\xc3\xa9", 2, 0, 0, match, NULL) != 1) { printf("does not match a letter with an accent\n"); return 1; }
    pcre2_config(PCRE2_CONFIG_VERSION, version);
    pcre2_config(PCRE2_CONFIG_JIT, &jit);
    printf("%s, Unicode%s\n", version, jit && pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0 ? ", JIT" : "; no JIT: the tokenizer is slower");
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    return 0;
}
