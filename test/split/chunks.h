/*
chunks.h - the classifier of a small model in several chunks: at most 2^14 logits at a time, but at least 64 rows. Compile all programs
that are to be compared with -include test/split/chunks.h, before other headers of this folder.
*/
#define CLASSIFIER_ELEMENTS_CUDA (1 << 14)
#define CLASSIFIER_ELEMENTS_MOST (1 << 14)
#define CLASSIFIER_BYTES 64
#define CLASSIFIER_ELEMENTS_CPU (1 << 14)
#include "../../llmc/device/layers.h"
