"""Shapes of models by name, and what follows from a shape: parameters, FLOPs, activations.

Shapes    GPT-2's are its own (Radford et al. 2019). GPT-3's are table 2.1 of arXiv 2005.14165, whose XL has "24" heads of 128 for
          2048 channels (16 fit) and whose 13B has "5140" channels (its heads make 5120); its sparse attention counts as dense.
          Megatron's are table 1 of arXiv 2104.04473 and table 3 of arXiv 2205.05198. Llama 3's are table 3 of arXiv 2407.21783, as
          torchtitan has them (torchtitan/models/llama3 at b5bcd76). Llama 2's is that of arXiv 2307.09288, in Llama 3's form.
FLOPs     are per token, of both passes. Attention's two (T,T) products take 4 C T per block and forward pass; a causal mask leaves
          half of that.
"""
from collections import namedtuple
from tool import ceil_div


class Shape(namedtuple("Shape", "name L C NH V T grouped gated", defaults=(0, 0))):
    """Blocks, channels, heads, tokens, the longest sequence. Llama's: heads of keys and values, width of a gated MLP; it also has
    RMS norms, rotary positions, an untied head and no biases."""
    llama = property(lambda self: self.gated > 0)
    NKV = property(lambda self: self.grouped or self.NH)
    F = property(lambda self: self.gated or 4 * self.C) # width of the MLP
    Vp = property(lambda self: ceil_div(self.V, 128) * 128) # tokens, padded
    kv_channels = property(lambda self: self.C // self.NH * self.NKV)

    def block_weights(self):
        """The matrices of a block."""
        return 2 * self.C * self.C + 2 * self.C * self.kv_channels + (3 if self.llama else 2) * self.C * self.F

    def block_vectors(self):
        """The norms of a block, and its biases: of q, k and v, of proj, fc and fcproj."""
        return 2 * self.C if self.llama else 4 * self.C + (self.C + 2 * self.kv_channels) + self.C + self.F + self.C

    def root_parameters(self):
        """The embedding of tokens and positions, the last norm, and an untied head."""
        return 2 * self.V * self.C + self.C if self.llama else (self.V + self.T + 2) * self.C

    def unit(self, u, t=1):
        """Elements on one of t ranks of GPT-2's root (0, with padded tokens), or of a block's attention half (1) or MLP half
        (2)."""
        C = self.C
        if u == 0: return self.Vp * C // t + (self.T + 2) * C
        return (4 * C * C + 3 * C if u == 1 else 8 * C * C + 4 * C) // t + 3 * C

    def block(self, t=1): return self.unit(1, t) + self.unit(2, t)

    def parameters(self): return self.L * (self.block_weights() + self.block_vectors()) + self.root_parameters()
    def elements(self): return self.unit(0) + self.L * self.block()

    # flops: 6 per weight of the matrices, including the head. flops_per_token, which our programs and llm.c use: 6 per parameter,
    # and causal attention. flops_recomputed repeats every block's forward pass; if all of attention counts, it is equation 3 of
    # arXiv 2104.04473.
    def attention_flops(self, T, causal): return (6 if causal else 12) * self.C * T
    def block_flops(self, T, causal): return 6 * self.block_weights() + self.attention_flops(T, causal)
    def flops(self, T, causal): return self.L * self.block_flops(T, causal) + 6 * self.C * self.V
    def flops_per_token(self, T): return 6.0 * self.parameters() + self.L * self.attention_flops(T, True)
    def flops_recomputed(self, T, causal): return self.flops(T, causal) + self.L * self.block_flops(T, causal) / 3

    def block_activations(self, t, rows):
        """Numbers per token that one of t ranks keeps of a block for its backward pass. rows: the inputs and outputs of the norms
        are shared, too. Attention keeps q, k, v and its output, as FlashAttention does; fp32 statistics do not count."""
        inside = 2 * self.C + 2 * self.kv_channels + (3 if self.llama else 2) * self.F
        return 4 * self.C / (t if rows else 1) + inside / t


SHAPES = {row[0]: Shape(*row) for row in (
    *((f"gpt2{name}", L, C, NH, 50257, 1024) for name, L, C, NH in (
        ("", 12, 768, 12), ("-medium", 24, 1024, 16), ("-large", 36, 1280, 20), ("-xl", 48, 1600, 25))),
    *((f"gpt3-{name}", L, C, NH, 50257, 2048) for name, L, C, NH in (
        ("125m", 12, 768, 12), ("350m", 24, 1024, 16), ("760m", 24, 1536, 16), ("1.3b", 24, 2048, 16), ("2.7b", 32, 2560, 32),
        ("6.7b", 32, 4096, 32), ("13b", 40, 5120, 40), ("175b", 96, 12288, 96))),
    *((f"megatron-{name}", L, C, NH, 51200, 2048) for name, L, C, NH in (
        ("1.7b", 24, 2304, 24), ("3.6b", 30, 3072, 32), ("7.5b", 36, 4096, 32), ("18b", 40, 6144, 48), ("22b", 48, 6144, 64),
        ("39b", 48, 8192, 64), ("76b", 60, 10240, 80), ("146b", 80, 12288, 96), ("175b", 96, 12288, 96), ("310b", 96, 16384, 128),
        ("530b", 105, 20480, 128), ("1t", 128, 25600, 160))),
    ("llama2-7b", 32, 4096, 32, 32000, 4096, 32, 11008),
    ("llama3-8b", 32, 4096, 32, 128256, 8192, 8, 14336), ("llama3-70b", 80, 8192, 64, 128256, 8192, 8, 28672),
    ("llama3-405b", 126, 16384, 128, 128256, 8192, 8, 53248))}


# GPT-2's models have 1024 positions; other shapes have one for each token of a sequence.
def is_gpt2(s): return s.name.startswith("gpt2") and s == SHAPES[s.name]


def bytes_of_states(zero, N, halves=True, master=True, gradient=0):
    """Bytes of a parameter's weight, gradient and optimizer state on one of N ranks. In 16 bits they are 2 + 2 + 12, with an fp32
    master copy and two moments (Rajbhandari et al. 2020, section 3.1); in fp32 4 + 4 + 8. ZeRO-1 shards the optimizer's state,
    ZeRO-2 also gradients, ZeRO-3 and FSDP (zero from 3 on) everything."""
    X = 2 if halves else 4
    return [x / N if zero >= since else x
            for x, since in ((X, 3), (gradient or X, 2), (8 + (4 if halves and master else 0), 1))]
