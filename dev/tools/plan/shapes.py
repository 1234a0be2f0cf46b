"""Shapes of published models by name, and what follows from a shape: parameters, FLOPs, activations.

Shapes    GPT-2's are its own (Radford et al. 2019), as gpt2.h has them. GPT-3's are table 2.1 of arXiv 2005.14165, whose XL
          has "24" heads of 128 for 2048 channels (16 fit) and whose 13B has "5140" channels (its heads make 5120); its
          sparse attention layers are counted as dense. Megatron's are table 1 of arXiv 2104.04473 and table 3 of arXiv
          2205.05198, both with 51,200 tokens. Llama 3's are those of arXiv 2407.21783, table 3, as torchtitan has them
          (torchtitan/models/llama3 at b5bcd76).
FLOPs     are those per token of forward and backward pass, 6 per weight of a matrix that it passes, the head among them.
          Attention's two (T,T) products are 4 C T per block and forward pass, of which a causal mask leaves half.
"""
from typing import NamedTuple


class Shape(NamedTuple):
    name: str
    L: int                   # blocks
    C: int                   # channels
    NH: int                  # heads
    NKV: int                 # heads of keys and values: fewer are grouped queries
    F: int                   # width of the MLP
    V: int                   # tokens
    T: int                   # longest sequence
    llama: bool = False      # gated MLP, RMS norms, rotary positions, an untied head, no biases; else GPT's of each

    def kv_channels(self): return self.C / self.NH * self.NKV

    def block_weights(self):
        """Of a block's matrices."""
        return 2.0 * self.C * self.C + 2.0 * self.C * self.kv_channels() + (3.0 if self.llama else 2.0) * self.C * self.F

    def block_vectors(self):
        """Norms, and biases if it has them: of q, k and v, of proj, of fc and of fcproj."""
        C = self.C
        return 2.0 * C if self.llama else 4.0 * C + (C + 2 * self.kv_channels()) + C + self.F + C

    def root_parameters(self):
        """The embedding of tokens and positions, the last norm, and an untied head."""
        return 2.0 * self.V * self.C + self.C if self.llama else (float(self.V) + self.T + 2) * self.C

    def parameters(self): return self.L * (self.block_weights() + self.block_vectors()) + self.root_parameters()
    def attention_flops(self, T, causal): return (6.0 if causal else 12.0) * self.C * T
    def block_flops(self, T, causal): return 6 * self.block_weights() + self.attention_flops(T, causal)
    def flops(self, T, causal): return self.L * self.block_flops(T, causal) + 6.0 * self.C * self.V

    def flops_recomputed(self, T, causal):
        """With every block's forward pass done again. Without the causal half these are equation 3 of arXiv 2104.04473."""
        return self.flops(T, causal) + self.L * self.block_flops(T, causal) / 3

    def block_activations(self, t, rows):
        """Numbers per token that a rank keeps of a block for its backward pass. t ranks share them; rows: also the inputs and
        outputs of the two norms. Attention keeps q, k, v and its output, as FlashAttention does; fp32 statistics are left out."""
        inside = 2.0 * self.C + 2 * self.kv_channels() + (3.0 if self.llama else 2.0) * self.F
        return 4.0 * self.C / (t if rows else 1) + inside / t


def gpts(family, V, T, rows): return [Shape(family + name, L, C, NH, NH, 4 * C, V, T) for name, L, C, NH in rows]


SHAPES = {shape.name: shape for shape in (
    *gpts("gpt2", 50257, 1024, (("", 12, 768, 12), ("-medium", 24, 1024, 16), ("-large", 36, 1280, 20), ("-xl", 48, 1600, 25))),
    *gpts("gpt3-", 50257, 2048, (
        ("125m", 12, 768, 12), ("350m", 24, 1024, 16), ("760m", 24, 1536, 16), ("1.3b", 24, 2048, 16), ("2.7b", 32, 2560, 32),
        ("6.7b", 32, 4096, 32), ("13b", 40, 5120, 40), ("175b", 96, 12288, 96))),
    *gpts("megatron-", 51200, 2048, (
        ("1.7b", 24, 2304, 24), ("3.6b", 30, 3072, 32), ("7.5b", 36, 4096, 32), ("18b", 40, 6144, 48), ("22b", 48, 6144, 64),
        ("39b", 48, 8192, 64), ("76b", 60, 10240, 80), ("146b", 80, 12288, 96), ("175b", 96, 12288, 96), ("310b", 96, 16384, 128),
        ("530b", 105, 20480, 128), ("1t", 128, 25600, 160))),
    Shape("llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, True),
    Shape("llama3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, True),
    Shape("llama3-405b", 126, 16384, 128, 8, 53248, 128256, 8192, True))}
