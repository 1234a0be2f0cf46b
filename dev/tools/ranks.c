/*
ranks.c - says where ranks parted: build/ranks OUT/ops_rank_*.txt, after a run that failed because a rank hung, died or did
something different from the others. Status 0: the files show no difference; 2: the ranks parted; 1: a file cannot be read.
*/
#include "ranks.h"

int main(int argc, char** argv) {
    if (argc < 2 || argv[1][0] == '-') {
        printf("usage: %s OUT/ops_rank_*.txt\nSays at which operation the ranks of a failed run parted.\n", argv[0]);
        return argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) ? EXIT_SUCCESS : EXIT_FAILURE;
    }
    int n = argc - 1;
    RankFile** files = (RankFile**)xcalloc((size_t)n, sizeof(RankFile*));
    for (int i = 0; i < n; i++) files[i] = rank_file_read(argv[1 + i]);
    bool together = rank_files_compare(files, n, stdout);
    for (int i = 0; i < n; i++) free(files[i]);
    free(files);
    return together ? EXIT_SUCCESS : 2;
}
