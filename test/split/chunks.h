/*
chunks.h - the classifier of a small model in several chunks: at most 2^14 logits at a time, but at least 64 rows. Compile
all programs that are to be compared with -include test/split/chunks.h, before other headers of this folder.
*/
#ifndef SPLIT_CHUNKS_H
#define SPLIT_CHUNKS_H
#include "../../llmc/device/layers.h"
#define classifier_rows(N, Vp) classifier_rows_of(1 << 14, N, Vp)
#endif
