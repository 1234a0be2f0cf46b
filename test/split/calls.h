/*
calls.h - tensor.h and data.h include this at their ends: of these layers the program then calls SPLIT_CALL(name), their own version. For a
matrix product the name of its weights is noted.
*/
#define matmul_forward(out, inp, w, ...) (SPLIT_ROLE(w), SPLIT_CALL(matmul_forward)(out, inp, w, __VA_ARGS__))
#define matmul_gelu_forward(out, pre, inp, w, ...) (SPLIT_ROLE(w), SPLIT_CALL(matmul_gelu_forward)(out, pre, inp, w, __VA_ARGS__))
#define matmul_backward_input(dinp, dout, w, ...) (SPLIT_ROLE(w), SPLIT_CALL(matmul_backward_input)(dinp, dout, w, __VA_ARGS__))
#define matmul_gelu_backward_input(dinp, dout, w, ...) (SPLIT_ROLE(w), SPLIT_CALL(matmul_gelu_backward_input)(dinp, dout, w, __VA_ARGS__))
#define matmul_backward_weight(dw, ...) (SPLIT_ROLE(dw), SPLIT_CALL(matmul_backward_weight)(dw, __VA_ARGS__))
#define matmul_backward_weight_chunk(dw, ...) (SPLIT_ROLE(dw), SPLIT_CALL(matmul_backward_weight_chunk)(dw, __VA_ARGS__))
#define attention_forward SPLIT_CALL(attention_forward)
#define attention_backward SPLIT_CALL(attention_backward)
#define classifier_forward SPLIT_CALL(classifier_forward)
#define classifier_forward_backward SPLIT_CALL(classifier_forward_backward)
