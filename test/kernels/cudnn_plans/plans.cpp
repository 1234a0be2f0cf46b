/*
plans.cpp - makes plans for attention's graphs without a GPU: cuDNN accepts a description of the device instead.

    plans DEVICE.json B T NH HS [deterministic]

builds complete plans, with compiled kernels, for both graphs of llmc/device/cuda/attention_cudnn.cuh, and prints each plan's engine and
workspace. Status 1: cuDNN refuses, and the line says why.
*/
#include "../../../llmc/device/cuda/attention_cudnn.cuh"

// Makes cuDNN's description of a device from the file's text.
static cudnnBackendDescriptor_t read_device(CudnnGraph* g, const char* path) {
    static char text[1 << 14];
    FILE* f = fopen(path, "r");
    require(f != NULL, "%s cannot be read", path);
    size_t n = fread(text, 1, sizeof text, f);
    fclose(f);
    g->step = path;
    cudnnBackendDescriptor_t device = graph_create(g, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    graph_set_array(g, device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)n, text);
    graph_finalize(g, device);
    require(g->why[0] == 0, "%s", g->why);
    return device;
}

int main(int argc, char** argv) {
    bool deterministic = argc == 7 && strcmp(argv[6], "deterministic") == 0;
    require(argc == 6 || deterministic, "usage: plans DEVICE.json B T NH HS [deterministic]");
    AttentionShape s = { atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]) };
    const char* missing = cudnn_load();
    require(missing[0] == 0, "%s", missing);
    static CudnnGraph owner, forward, backward;
    forward.device = backward.device = read_device(&owner, argv[1]);
    attention_forward_graph(&forward, s);
    attention_backward_graph(&backward, s, deterministic);
    int refused = 0;
    for (CudnnGraph* g : { &forward, &backward }) {
        printf("%s: ", g == &forward ? "forward" : "backward");
        if (graph_plan(g)) printf("engine %d, %zu bytes of workspace\n", (int)g->engine, (size_t)g->workspace_bytes);
        else printf("refused: %s\n", g->why);
        refused |= g->why[0] != 0;
        graph_free(g);
    }
    graph_free(&owner);
    return refused;
}
