// Jansson: it must refuse a duplicate key, which is why it was chosen. Prints its version.
#include <jansson.h>
#include <stdio.h>

int main(void) {
    json_error_t error;
    json_t* twice = json_loads("{\"a\": 1, \"a\": 2}", JSON_REJECT_DUPLICATES, &error);
    printf(twice ? "it accepts duplicate keys\n" : "%s\n", jansson_version_str());
    return twice != NULL;
}
